import pathlib,re
P={p.name[5:]:p.read_text() for p in pathlib.Path('.tmp').glob('part_*')}
head=P['head']
def const(name):
    m=re.search(rf'^{name}: .*?^}}\n',head,re.M|re.S); return m[0]
without=head[head.index('def without'):head.index('def place')]
place=head[head.index('def place'):].rstrip()+'\n'
place=place.replace('def place(topology: Topology) -> tuple[int, ...]:\n','def layout(topology: Topology) -> tuple[int, ...]:\n    """Return rank, world size, local rank, local world size, node rank and number of nodes."""\n')
support='''"""Environment variables of launchers, for tests of topologies. Those of Slurm are as srun 22.05 sets them on three nodes.

Variables that no code reads are left out.
"""

from __future__ import annotations

from hpcdist.rank.topology import Topology

Env = dict[str, str]

'''
for n in ('OWN','TORCHRUN','STEP','HET','ARBITRARY','BATCH'): support+=const(n)
support=support.replace('HET: Env = {  # one step over two components, 1 x 1 and 2 x 2 tasks, as rank 4 saw it\n','#: Rank 4 of one step over two components of 1 x 1 and 2 x 2 tasks.\nHET: Env = {\n')
support=support.replace('STEP: Env = {  # srun -N3 -n5, rank 1\n','#: Rank 1 of `srun -N3 -n5`.\nSTEP: Env = {\n')
support=support.replace('ARBITRARY: Env = {  # a host file of n3 n1 n1 n2 n2, as rank 0 saw it: Slurm sorts the nodes\n','#: Rank 0 of a step with the host file n3 n1 n1 n2 n2; Slurm sorts the nodes.\nARBITRARY: Env = {\n')
support=support.replace('BATCH: Env = {  # the shell of sbatch -n1\n','#: The shell of `sbatch -n1`.\nBATCH: Env = {\n')
support+='\n\n'+without.rstrip()+'\n\n\n'+place
pathlib.Path('tests/support/launcher_env.py').write_text(support)
def sect(t):  # drop section rules of dashes
    return re.sub(r'^# --- (.*?) -+$',r'# --- \1',t,flags=re.M)
none=P['none']
i=none.index('@pytest.mark.parametrize(\n    "changes"'); j=none.index('@pytest.mark.parametrize(\n    ("env", "problem")')
none_slurm=none[i:j]; none=none[:i]+none[j:]
top='''"""Topology: its invariants, and how it is read from the variables of hpcdist, of torchrun and of no launcher."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest
from launcher_env import OWN, STEP, TORCHRUN, Env, layout, without

from hpcdist.errors import TopologyError
from hpcdist.rank.topology import Topology, port_for

'''+const('VALID')+'\n\n'+P['val']+P['own']+P['torchrun']+none+P['ports']
slurm='''"""Topology from the variables of Slurm, inside and outside of srun steps."""

from __future__ import annotations

import re

import pytest
from launcher_env import ARBITRARY, BATCH, HET, OWN, STEP, Env, layout, without

from hpcdist.errors import TopologyError
from hpcdist.rank.topology import Topology, port_for

'''+'\n'+P['slurm'].split('\n',2)[2].lstrip()+'\n\n'+P['het'].split('\n',2)[2].lstrip().rstrip()+'\n\n\n# --- Slurm jobs without an srun step\n\n\n'+none_slurm
R={
'test_valid_topology_is_frozen_and_has_a_token':'test_topology_is_frozen_and_its_token_depends_on_job_and_attempt',
'test_invariants':'test_inconsistent_fields_are_refused',
'test_own_variables_come_before_all_others':'test_own_variables_take_precedence_over_torchrun_and_slurm',
'test_own_variables_refused':'test_incomplete_or_invalid_own_variables_are_refused',
'test_torchrun_comes_before_slurm':'test_torchrun_takes_precedence_over_slurm',
'test_torchrun_layouts':'test_torchrun_layouts_with_optional_variables_left_out',
'test_torchrun_restart_and_neighbour_change_the_token':'test_token_differs_after_torchrun_restart_and_between_ports',
'test_torchrun_refused':'test_incomplete_or_invalid_torchrun_variables_are_refused',
'test_slurm_step':'test_rank_of_a_slurm_step','test_slurm_layouts':'test_layouts_of_slurm_steps',
'test_slurm_falls_back_to_the_jobs_variables':'test_variables_of_the_job_replace_missing_step_variables',
'test_slurm_attempts_and_overrides':'test_own_variables_override_attempt_and_rendezvous_of_slurm',
'test_slurm_rank_0_on_another_node_is_found_by_its_address':'test_rank_0_on_another_node_is_accepted_with_its_address',
'test_slurm_rank_0_on_another_node_without_its_address':'test_rank_0_on_another_node_is_refused_without_its_address',
'test_slurm_refused':'test_incomplete_or_contradictory_slurm_variables_are_refused',
'test_world_of_one_in_an_allocation_of_one_task':'test_allocation_of_one_task_without_a_step_is_a_single_rank',
'test_no_world_of_one_in_a_job_of_several_tasks':'test_process_outside_of_a_step_is_refused_in_a_job_of_several_tasks',
'test_no_world_of_one_by_halves':'test_variables_that_indicate_more_ranks_are_refused',
'test_world_of_one':'test_environment_without_a_launcher_is_a_single_rank',
'test_ports_are_fixed_and_in_their_range':'test_ports_are_deterministic_and_in_range',
'test_ports_of_jobs_that_follow_each_other':'test_ports_of_consecutive_jobs_differ',
'test_ports_are_the_same_in_every_process':'test_port_does_not_depend_on_the_process',
'test_ranks_count_through_a_heterogeneous_step':'test_ranks_of_a_heterogeneous_step_are_numbered_over_all_components',
'test_nodes_of_a_heterogeneous_step_count_by_component':'test_nodes_of_a_heterogeneous_step_are_ordered_by_component',
'"""Seen with 22.05: the first component\'s node comes last by name, and is SLURM_NODEID 0."""':'"""As recorded with Slurm 22.05: the node of the first component is the last by name, but has SLURM_NODEID 0."""',
'test_a_step_in_one_component_alone':'test_step_in_one_component_of_a_heterogeneous_job',
'test_ranks_that_were_told_their_nodes_meet_where_rank_0_is':'test_master_of_an_arbitrary_distribution_is_the_node_of_rank_0',
'RANK_0_ELSEWHERE':'RANK_0_ON_LAST_NODE','named':'shown','# --- the value':'# --- invariants','# --- our own variables':'# --- variables of hpcdist',"# --- torchrun's":'# --- variables of torchrun','# --- none of them':'# --- no launcher',
'neighbour':'other_run','following':'next_port','near':'ports',
}
def ren(t):
    for a,b in R.items():
        t=re.sub(rf'(?<!\w){re.escape(a)}(?!\w)',b,t)
    t=re.sub(r'\bplace\(',r'layout(',t)
    return t
pathlib.Path('tests/unit/rank/test_topology.py').write_text(ren(sect(top)))
pathlib.Path('tests/unit/rank/test_slurm_topology.py').write_text(ren(sect(slurm)))
dev=pathlib.Path('tests/unit/rank/test_device.py').read_text()
ron=P['ron'].replace('test_the_ranks_of_a_node','test_ranks_on_node_follow_the_distribution')
gpu=P['gpu'].split('\n',2)[2].lstrip()
gpu=gpu.replace('Topology(**VALID | local | {"world_size": local_world_size + 1, "node_rank": 0})','XX')
gpu=re.sub(r'def on_node.*?\n\n\n','',gpu,flags=re.S)
gpu=gpu.replace('on_node(','rank_of_node(')
for a,b in {'test_cuda_index_refuses_to_share':'test_cuda_index_refuses_to_share_a_gpu_between_ranks','test_cuda_index_reads_strictly':'test_cuda_index_refuses_invalid_number_of_gpus','test_cuda_index_counts_those_alone_that_use_gpus':'test_cuda_index_counts_only_ranks_that_use_gpus'}.items(): gpu=re.sub(rf'\b{a}\b',b,gpu)
gpu=re.sub(r'\btest_cuda_index\b(?=\()','test_cuda_index_of_ranks_with_enough_gpus',gpu)
for a,b in {
'"""Which device and backend a rank gets; two GPUs are pretended, and none is touched."""':'"""Device and backend of a rank. Tests with GPUs replace the functions of torch that find them."""',
'def rank(number: int, world_size: int = 4, launcher: Any = "hpcdist") -> Topology:':'def rank_of_node(number: int, world_size: int = 4) -> Topology:\n    """Return the topology of a rank on a single node."""',
'launcher=launcher,\n        job_id':'launcher="hpcdist",\n        job_id',
'def placed(config: Config, env: dict[str, str] | None = None, launcher: Any = "hpcdist") -> list[tuple[str, str]]:\n    """Device and backend of each of four ranks on one machine."""\n    found = [place(config, rank(number, launcher=launcher), env or {}) for number in range(4)]':'def place_all(config: Config) -> list[tuple[str, str]]:\n    """Return device and backend of each of four ranks on one node."""\n    found = [place(config, rank_of_node(number), {}) for number in range(4)]',
'placed(':'place_all(','rank(1, 2)':'rank_of_node(1, 2)','rank(0)':'rank_of_node(0)','rank(1)':'rank_of_node(1)','rank(0, 2)':'rank_of_node(0, 2)',
'test_roles_without_a_gpu_leave_them_to_the_trainers':'test_gpus_go_to_the_trainers_if_other_roles_use_the_cpu',
'test_two_ranks_that_want_gpus_and_see_too_few':'test_more_ranks_with_gpus_than_visible_gpus_are_refused',
'test_all_on_gpus_use_nccl':'test_ranks_that_all_use_gpus_use_nccl','test_a_role_that_must_have_a_gpu':'test_role_that_requires_a_gpu_is_refused_without_one',
'test_roles_that_do_not_make_up_the_world':'test_roles_that_do_not_add_up_to_the_world_size_are_refused',
'from typing import Any\n\nimport pytest\nimport torch\n':'import re\n\nimport pytest\nimport torch\nfrom launcher_env import HET, OWN, STEP, Env\n',
'from hpcdist.errors import ConfigError\nfrom hpcdist.rank.device import place\n':'from hpcdist.errors import ConfigError, TopologyError\nfrom hpcdist.rank.device import cuda_index, place, ranks_on_node\n',
}.items():
    assert a in dev,a
    dev=dev.replace(a,b)
dev=dev.rstrip()+'\n\n\n'+ron.rstrip()+'\n\n\n# --- index of the GPU\n\n\n'+gpu
pathlib.Path('tests/unit/rank/test_device.py').write_text(dev)
