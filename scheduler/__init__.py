"""What comes next and where it should run: transitions, routing, planning, and the Ray actor around them."""
