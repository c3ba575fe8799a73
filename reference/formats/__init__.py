"""Number formats, and numbers to codes and back."""
