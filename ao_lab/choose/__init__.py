"""`choose_`: which configuration each layer gets under a budget of bytes or time."""
