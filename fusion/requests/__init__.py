"""What callers ask for: requests, what is legal, and the handles that they wait on."""
