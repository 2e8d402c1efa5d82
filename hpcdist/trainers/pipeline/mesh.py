"""The place of a rank in a pipeline: replicas of the model, each of which is a row of stages on consecutive ranks."""

from dataclasses import dataclass

from hpcdist.config.roles import share_of


@dataclass(frozen=True, kw_only=True)
class StageMesh:
    """The ranks of a run as a mesh {replica, stage}, and this rank's place in it.

    With 3 replicas of 2 stages, rank 0 is stage 0 of the first replica, rank 1 its stage 1, rank 2 stage 0 of the next
    one. Neighbouring stages, which exchange the activations, so share a node where possible.
    """

    rank: int
    num_stages: int
    num_replicas: int

    @property
    def stage(self) -> int:
        """The index of this rank's stage."""
        return self.rank % self.num_stages

    @property
    def replica(self) -> int:
        """The index of this rank's replica."""
        return self.rank // self.num_stages

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the images."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the labels and the loss."""
        return self.stage == self.num_stages - 1

    def shares(self, num_micro_batches: int) -> list[range]:
        """Return the micro-batches of a step that each replica computes; their numbers differ by at most one."""
        return [share_of(replica, self.num_replicas, num_micro_batches) for replica in range(self.num_replicas)]

    def ranks_of_stage(self, stage: int) -> range:
        """Return the ranks that hold copies of a stage, one in each replica."""
        return range(stage, self.num_stages * self.num_replicas, self.num_stages)

    def ranks_of_replica(self, replica: int) -> range:
        """Return the ranks of a replica, in the order of their stages."""
        first = replica * self.num_stages
        return range(first, first + self.num_stages)
