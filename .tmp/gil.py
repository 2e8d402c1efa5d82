import sys,threading,time,tempfile,pathlib,statistics
sys.path.insert(0,'benchmarks')
import torch
from checkpoint_stall import make_state,busy_rate
from hpcdist.checkpoint.checkpoint_folder import save_file
torch.manual_seed(0); state=make_state(200_000_000,torch.device('cpu'))
d=pathlib.Path(tempfile.mkdtemp(dir='/var/tmp'))
import os
def plain(p): 
    torch.save(state,p)
    with open(p,'rb') as f: os.fsync(f.fileno())
res={'hash':[],'path':[]}
for r in range(8):
    for k,f in (('hash',lambda: save_file(state,d/'a')),('path',lambda: plain(d/'b'))):
        e=threading.Event(); t=threading.Timer(0.4,e.set); t.start(); alone,_=busy_rate(e)
        e=threading.Event()
        def w(): f(); e.set()
        th=threading.Thread(target=w); th.start(); s=time.perf_counter(); rate,pause=busy_rate(e); dt=time.perf_counter()-s; th.join()
        res[k].append((rate/alone,pause,dt))
for k,v in res.items(): print(k,*('%.2f'%statistics.median(x) for x in zip(*v)))
