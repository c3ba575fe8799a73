"""Products prepared for inputs like those that they had, for those who keep their weights."""
