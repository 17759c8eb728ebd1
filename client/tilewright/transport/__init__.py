"""Ways to the server: remote calls, packets of the local socket, and what drives them."""
