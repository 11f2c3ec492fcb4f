"""The checks of the conformance kit, one kind a file."""
