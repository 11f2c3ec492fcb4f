"""How a process finds its rank, its transport and the others, and how it leaves them."""
