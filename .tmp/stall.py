import sys,time,statistics,tempfile,pathlib,warnings
warnings.simplefilter('ignore')
sys.path.insert(0,'benchmarks')
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import *
from checkpoint_stall import make_state
from hpcdist.checkpoint.saver import AsyncSaver
from hpcdist.checkpoint.store import CheckpointStore
torch.manual_seed(0)
state=make_state(200_000_000,torch.device('cpu'))
out={}
with tempfile.TemporaryDirectory() as d:
    d=pathlib.Path(d)
    st=DefaultStager(StagingOptions(False,False,False,False))
    saver=AsyncSaver(CheckpointStore(d/'c'))
    for i in range(10):
        for name in ('default','stager','ours'):
            t=time.perf_counter()
            if name=='ours': saver.save(i,**state,rank_states=[None])
            else: f=dcp.async_save(state,checkpoint_id=d/f'{name}',no_dist=True,async_stager=st if name=='stager' else None)
            stall=time.perf_counter()-t
            if name=='ours': saver.wait()
            else: f.result()
            out.setdefault(name,[]).append((stall,time.perf_counter()-t))
    saver.close()
for k,v in out.items(): print(k,'first %.1f'%(1e3*v[0][0]),'median stall %.1f ms'%(1e3*statistics.median(s for s,_ in v[1:])),'min %.1f max %.1f'%(1e3*min(s for s,_ in v[1:]),1e3*max(s for s,_ in v[1:])),'written %.0f'%(1e3*statistics.median(s for _,s in v[1:])))
# view of a larger storage
big=torch.zeros(1_000_000)
s=DefaultStager(StagingOptions(False,False,False,False)).stage({'v':big[:10]})
print('stored bytes of 10-element view', s['v'].untyped_storage().nbytes())
# corrupt data undetected?
d=tempfile.mkdtemp(); p=pathlib.Path(d)
m={'w':torch.zeros(1000),'n':{'lr':0.1}}
dcp.save(m,checkpoint_id=p/'a',no_dist=True)
f=[x for x in (p/'a').iterdir() if x.suffix=='.distcp'][0]; b=bytearray(f.read_bytes()); i=len(b)//2; b[i]^=0xff; f.write_bytes(b)
m2={'w':torch.ones(1000),'n':{'lr':0.0}}
try:
    dcp.load(m2,checkpoint_id=p/'a',no_dist=True); print('loaded corrupt: nonzero', int((m2['w']!=0).sum()))
except Exception as e: print('err',type(e),str(e)[:200])
