"""Tensors submitted one by one: how they wait for company, are asked for and executed."""
