import pathlib
class F:
    def __init__(s,p): s.p=pathlib.Path(p); s.t=s.p.read_text()
    def sub(s,x,y):
        assert s.t.count(x)==1,(s.p,s.t.count(x),x); s.t=s.t.replace(x,y); return s
    def cut(s,a,b,y=''):
        assert s.t.count(a)==1,(s.p,s.t.count(a),a)
        i=s.t.index(a); j=s.t.index(b,i); s.t=s.t[:i]+y+s.t[j:]; return s
    def save(s): s.p.write_text(s.t)
