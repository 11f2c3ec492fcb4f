"""A model's parameters: their names, which are frozen, and what compressors remember of them."""
