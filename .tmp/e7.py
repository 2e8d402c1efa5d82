import sys,re; sys.path.insert(0,'.tmp')
from e import F
import pathlib
t=F('tests/unit/rank/test_topology.py')
d=F('tests/unit/rank/test_device.py')
i=t.t.index('# --- GPUs ----'); gpu=t.t[i:]; t.t=t.t[:i].rstrip()+'\n'
# ranks on node
j=t.t.index('def test_the_ranks_of_a_node'); ron=t.t[j:]; t.t=t.t[:j].rstrip()+'\n'
# ports
a=t.t.index('# --- ports ---'); b=t.t.index('# --- roles on different nodes'); ports=t.t[a:b]; het=t.t[b:]; t.t=t.t[:a].rstrip()+'\n'
# slurm part
a=t.t.index("# --- Slurm's ---"); b=t.t.index('# --- none of them ---'); slurm=t.t[a:b]; none=t.t[b:]
a2=t.t.index("# --- torchrun's ---"); torchrun=t.t[a2:a]; own=t.t[t.t.index('# --- our own variables'):a2]; val=t.t[t.t.index('# --- the value'):t.t.index('# --- our own variables')]
head=t.t[:t.t.index('# --- the value')]
for k,v in dict(head=head,val=val,own=own,torchrun=torchrun,slurm=slurm,none=none,ports=ports,het=het,ron=ron,gpu=gpu).items(): pathlib.Path('.tmp/part_'+k).write_text(v)
