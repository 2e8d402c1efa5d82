"""Communication between the ranks of a run: is it right, and how fast is it (`trainer: comm`, `hpcdist bench comm`)."""
