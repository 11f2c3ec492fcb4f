"""Precision policies in an optimizer: masters, the loss scale, and steps taken back."""
