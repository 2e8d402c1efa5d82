"""`hpcdist doctor`: what works on this machine and what does not. `sections` has the parts, `section` looks at them."""
