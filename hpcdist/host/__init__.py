"""Files on shared file systems, facts about this machine, commands with a time limit."""
