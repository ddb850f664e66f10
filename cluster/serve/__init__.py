"""Ray Serve glue: ingress, agent server, agent router, application."""
