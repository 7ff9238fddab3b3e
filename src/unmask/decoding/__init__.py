"""Generation: one loop, and one small class for every unmasking rule."""
