"""The commands, by what they are for: `launching` starts runs, `managing` looks after them, `benching` measures."""
