"""Communicators, one transport a file, and what two of them share."""
