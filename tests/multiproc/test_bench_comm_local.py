"""`hpcdist bench comm` on this machine writes a report, measurements and plots."""

from __future__ import annotations

from hpcdist_runs import Runs

from hpcdist.bench.results import read_results

TINY = (
    "comm.operations=[send_recv,ring_all_reduce,all_reduce,pairs]",
    "comm.max_bytes=4K",
    "launch.device=cpu",
    "launch.num_ranks=2",
    "tracking.system_interval_s=0",
    "experiment=digits",
)


def test_local_benchmark_writes_report_csv_and_plots(runs: Runs) -> None:
    keys = (*TINY, f"tracking.uri=sqlite:///{runs.database}")
    code, output = runs.command("bench", "comm", *keys, "name=bench-first", "--compare", "last")
    assert code == 0, output
    artifacts = runs.run_dir("bench-first").artifacts
    results = read_results(artifacts)
    assert results.complete
    assert {row.operation for row in results.rows} == {"send_recv", "ring_all_reduce", "all_reduce"}
    assert all(check.ok for check in results.checked)
    report = (artifacts / "comm" / "report.txt").read_text()
    assert "2 ranks on 1 node (" in report
    assert "\nbottleneck: " in report
    printed = [line.rstrip() for line in output.splitlines()]
    assert [line for line in report.splitlines() if line not in printed] == [], "the same report is printed and written"
    for name in ("bandwidth", "latency", "pairs"):
        assert (artifacts / "comm" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert len((artifacts / "comm" / "results.csv").read_text().splitlines()) == len(results.rows) + 1

    assert "has no earlier run comparable with bench-first" in output
    assert runs.mlflow_status("bench-first") == "FINISHED"
    assert runs.param("bench-first", "trainer.target") == "comm", "identifies benchmarks in MLflow"
