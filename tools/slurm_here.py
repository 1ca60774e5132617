"""Start a Slurm of one node on this machine, run a command with it, and stop everything: for tests and measurements.

`python tools/slurm_here.py pytest -m cluster tests/tipc` needs root and Debian's packages slurm-wlm and munge. Everything
lies in a temporary folder: configuration, key, state and logs. SLURM_CONF names the configuration for the command.
SLURM_HERE_CPUS is the number of CPUs that Slurm believes the node to have [as many as there are]. The exit status is
that of the command, 2 if Slurm cannot be started.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
START_S = 60.0

CONFIGURATION = """\
ClusterName=mezzo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SwitchType=switch/none
MpiDefault=none
# Processes are found by their parents; there are no control groups that a container could withhold.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
# The memory of a job is measured every second, and a job with more than its limit is ended.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
DefMemPerCPU={cpu_memory_mb}
KillWait=5
MinJobAge=600
ReturnToService=2
SlurmctldTimeout=120
SlurmdTimeout=120
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,default_queue_depth=10000,max_depend_depth=20
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE
PartitionName=minute Nodes={host} MaxTime=1
"""


def main(command: list[str]) -> int:
    """Run a command beside a Slurm of its own; return its exit status."""
    if not command:
        sys.exit("usage: slurm_here.py COMMAND...")
    if os.getuid() != 0:
        sys.exit("slurm_here.py: needs root, since slurmd starts jobs for their users")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"slurm_here.py: {', '.join(missing)} not found; apt-get install slurm-wlm munge")
    with tempfile.TemporaryDirectory(prefix="slurm-here-") as name, running_slurm(Path(name)) as environment:
        process = subprocess.Popen(command, env=environment)
        # The command gets Ctrl-C itself; Slurm has to be stopped after it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        return process.wait()


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd in the foreground; yield the environment for Slurm's commands."""
    conf = folder / "slurm.conf"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o711)
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    cpus = int(os.environ.get("SLURM_HERE_CPUS") or len(os.sched_getaffinity(0)))
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 * 9 // 10
    conf.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            controller_port=_free_port(),
            node_port=_free_port(),
            cpus=cpus,
            memory_mb=memory_mb,
            cpu_memory_mb=memory_mb // cpus,
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    munge = ["--key-file", key, "--socket", folder / "munge/socket", "--pid-file", folder / "munge/pid"]
    munge += ["--log-file", folder / "munge/log", "--seed-file", folder / "munge/seed"]
    with ExitStack() as stack:
        for command in (
            ["munged", "--foreground", "--force", *map(str, munge)],
            ["slurmctld", "-D", "-c", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf)],
        ):
            stack.enter_context(_service(command, environment, folder))
        _wait_for_node(environment, folder)
        yield environment


@contextmanager
def _service(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    program = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
    with (folder / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen([program, *command[1:]], env=environment, stdout=log, stderr=log)
        try:
            time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_node(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if "idle" in state.stdout:
            return
        time.sleep(0.2)
    for path in sorted(folder.glob("*.log")):
        print(f"{path.name}: {path.read_text('utf-8', 'replace')[-1500:]}", file=sys.stderr)
    sys.exit(2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
