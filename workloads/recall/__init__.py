"""The in-context recall task and the training of the embedded MLA model."""
