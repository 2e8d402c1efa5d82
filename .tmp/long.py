import ast,sys,pathlib
for p in pathlib.Path('hpcdist').rglob('*.py'):
    if not str(p).startswith(('hpcdist/trainers','hpcdist/data','hpcdist/models')): continue
    for n in ast.walk(ast.parse(p.read_text())):
        if isinstance(n,(ast.FunctionDef,)) and n.end_lineno-n.lineno+1>48: print(p,n.name,n.end_lineno-n.lineno+1)
