"""What others offer for the cases."""
