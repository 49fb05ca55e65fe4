"""Sums over the ranks of one host, by stores into each other's memory."""
