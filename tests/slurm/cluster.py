"""A real SLURM for tests: munge, slurmctld and two slurmd on this host, in a folder of their own.

All of it is gone when this process is, however that ends.

The nodes are called 127.0.0.11 and 127.0.0.12, so that their names lead here without an entry in /etc/hosts.
Jobs of the partition `high` push those of `main`, the default, back into the queue.
"""

from __future__ import annotations

import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NEEDED = ('sbatch', 'srun', 'scontrol', 'squeue', 'scancel', 'slurmctld', 'slurmd', 'munged', 'setpriv')
NODES = ('127.0.0.11', '127.0.0.12')
CPUS = 8
ENDED = {'COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'PREEMPTED', 'BOOT_FAIL', 'DEADLINE'}
REPOSITORY = Path(__file__).parents[2]
LAUNCHERS = {
    'torchrun': REPOSITORY / 'launch/slurm/train.sbatch',
    'srun': REPOSITORY / 'launch/slurm/train_srun.sbatch',
}

CONFIG = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost=localhost({address})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=10
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname=localhost NodeAddr={address} Port=[{ports[1]}-{ports[2]}] CPUs={cpus} RealMemory=64000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why SLURM cannot be run here; None where it can."""
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f'no {", ".join(missing)} on PATH; on Debian: apt-get install slurm-wlm munge'
    try:
        socket.gethostbyname(os.uname().nodename)
    except OSError:
        return f'the name of this host, {os.uname().nodename}, has no address; /etc/hosts should give it one'
    return None


def _path() -> str:
    return f'{os.environ["PATH"]}:/usr/sbin:/sbin'


class Cluster:
    """`with Cluster(folder) as cluster:` is a running SLURM. `processes` are its daemons by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        own = {name: value for name, value in os.environ.items() if not name.startswith(('SLURM_', 'SBATCH_'))}
        self.environment = {**own, 'PATH': _path(), 'SLURM_CONF': str(folder / 'slurm.conf')}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        folder = self.folder
        (folder / 'state').mkdir()
        for node in NODES:
            (folder / f'spool-{node}').mkdir()
        key = folder / 'munge.key'
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        values = {'address': socket.gethostbyname(os.uname().nodename), 'user': getpass.getuser(), 'cpus': CPUS}
        values['first_job'] = random.randrange(1, 1_000_000)  # so that clusters side by side have other ports
        config = CONFIG.format(folder=folder, ports=_free_ports(3), nodes='127.0.0.[11-12]', **values)
        (folder / 'slurm.conf').write_text(config)
        # it reads from a pipe that closes when this process is gone, however it ends
        guard = [sys.executable, __file__, str(folder / 'slurm.conf')]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        places = {'key-file': 'key', 'socket': 'socket', 'pid-file': 'pid', 'seed-file': 'seed', 'log-file': 'log'}
        self.start('munged', '--foreground', '--force', *(f'--{k}={folder}/munge.{v}' for k, v in places.items()))
        self.start('slurmctld', '-D')
        for node in NODES:
            self.start_node(node)
        _until(lambda: self.idle_nodes() == len(NODES), 30, self._logs)

    def start(self, *command: str, name: str | None = None) -> None:
        """Starts a daemon as a child that the system ends when this process is gone, however it ends."""
        with (self.folder / f'{name or command[0]}.out').open('ab') as out:
            # a session of its own: Ctrl-C is for the tests
            self.processes[name or command[0]] = subprocess.Popen(
                ['setpriv', '--pdeathsig', 'KILL', *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment, start_new_session=True,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        self.start('slurmd', '-D', '-N', node, name=f'slurmd-{node}')

    def idle_nodes(self) -> int:
        done = self.run('sinfo', '-h', '-N', '-p', 'main', '-t', 'idle', '-o', '%N', check=False)
        return len(done.split())

    def __exit__(self, *_: object) -> None:
        if 'slurmctld' in self.processes:
            jobs = self.run('squeue', '-h', '-o', '%A', check=False).split()
            if jobs:
                self.run('scancel', '--signal=KILL', '--full', *jobs, check=False)
                self.run('scancel', *jobs, check=False)
        for name in reversed(self.processes):
            self.processes[name].terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._guard is not None:
            self._guard.communicate()

    def _logs(self) -> str:
        return '\n'.join(f'{p.name}: {p.read_text(errors="replace")[-1500:]}' for p in self.folder.glob('*.log'))

    def run(self, *command: str, check: bool = True, **more: str) -> str:
        done = subprocess.run(
            command, env={**self.environment, **more}, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f'{" ".join(command)} ended with {done.returncode}: {done.stderr.strip()}')
        return done.stdout.strip()

    # what tests say

    def submit(self, script: Path | str, *args: str, sbatch: tuple[str, ...] = (), **environment: str) -> str:
        """The id of a job that runs `script`, a path or a name of LAUNCHERS, with `args`; its output is
        `job-ID.out` of this folder. `environment` is added to that of this process."""
        path = LAUNCHERS.get(str(script), script)
        output = f'--output={self.folder}/job-%j.out'
        command = ('sbatch', '--parsable', f'--chdir={REPOSITORY}', output, *sbatch, str(path), *args)
        return self.run(*command, check=True, **environment).split(';')[0]

    def scontrol(self, *args: str) -> str:
        return self.run('scontrol', *args)

    def signal(self, job: str, name: str) -> None:
        """The signal goes to the batch script alone, as by `sbatch --signal=B:NAME@SECONDS`."""
        self.run('scancel', '--batch', f'--signal={name}', job)

    def about(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r'(\w+)=(\S*)', self.scontrol('--oneliner', 'show', 'job', job)))

    def wait_for(self, job: str, *states: str, seconds: float = 60) -> dict[str, str]:
        """Waits until the job is in one of the states (none: has ended), and says all about it."""
        wanted = set(states) or ENDED
        _until(
            lambda: self.about(job)['JobState'] in wanted,
            seconds,
            lambda: f'job {job}: {self.about(job)}\n{self.output_of(job)}\n{self._logs()}',
        )
        return self.about(job)

    def wait_for_output(self, job: str, text: str, times: int = 1, seconds: float = 60) -> str:
        """Waits until `text` stands in the output, `times` times, and gives it all."""
        _until(lambda: self.output_of(job).count(text) >= times, seconds, lambda: f'no {text!r}: {self.output_of(job)}')
        return self.output_of(job)

    def output_of(self, job: str) -> str:
        path = self.folder / f'job-{job}.out'
        return path.read_text(errors='replace') if path.exists() else ''


def _left(config: str) -> list[int]:
    """Processes of the jobs of the cluster with this slurm.conf, and their keepers."""
    mark, found = f'SLURM_CONF={config}'.encode(), []
    for entry in Path('/proc').glob('[0-9]*'):
        try:
            variables = (entry / 'environ').read_bytes().split(b'\0')
            name = (entry / 'comm').read_text().strip()
        except OSError:
            continue
        of_job = name == 'slurmstepd' or any(v.startswith(b'SLURM_JOB_ID=') for v in variables)
        if mark in variables and of_job:
            found.append(int(entry.name))
    return found


def _guard(config: str) -> None:
    sys.stdin.read()
    while left := _left(config):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _until(holds: Callable[[], bool], seconds: float, tell: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f'not within {seconds} s. {tell()}')
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """So many free ports, one behind another."""
    for first in range(26800, 32000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for port, each in enumerate(sockets, start=first):
                each.bind(('', port))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return list(range(first, first + count))
    raise RuntimeError('no free ports')


if __name__ == '__main__':
    _guard(sys.argv[1])
