"""Parameters that servers hold for trainers: rows of tables and of a vocabulary, how they are asked for and updated."""
