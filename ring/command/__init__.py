"""`ringlet run`: its arguments, what is wrong with them, and which launcher they start."""
