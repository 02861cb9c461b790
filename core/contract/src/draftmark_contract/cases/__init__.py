"""What backends are run on: geometries, forwards as token histories, trees, rounds of graphs. No torch."""
