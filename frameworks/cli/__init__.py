"""The sub-commands of ``ringlet`` that no other package has."""
