"""A real Slurm on this host for the length of a test run: two nodes, accounting, started and ended by pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db", "sbatch", "sacct")
NODES = ("n1", "n2")
PORTS = ("controller", "accounting", "database", *NODES)

CONFIGURATION = """ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={controller}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting}
AccountingStoragePass={folder}/munge/socket
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=9000\n"
PARTITIONS = """PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""
ACCOUNTING = """DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={accounting}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""


def missing() -> str:
    """Return why no Slurm can be started here, or an empty string."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge slurmdbd mariadb-server)" * (
        bool(absent)
    )


def free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Return a free port for each name; all are held until the last is found, so that they differ."""
    held = [socket.socket() for _ in names]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = {name: one.getsockname()[1] for name, one in zip(names, held, strict=True)}
    for one in held:
        one.close()
    return ports


class Slurm:
    """The daemons of a cluster in `folder`, every parent of which the user munge may enter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname().partition(".")[0]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Write the configuration and start everything, in the order in which one needs the other."""
        for name in ("run", "log", "state", "munge", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._configure(free_ports(PORTS))
        self._munge()
        self._database()
        self._daemon("slurmdbd", "-D", SLURM_CONF=str(self.folder / "slurmdbd.conf"))
        self._until("sacctmgr -n list cluster", lambda out: True)
        self.run("sacctmgr", "-i", "add", "cluster", "t")
        self._daemon("slurmctld", "-D", "-c", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._until("sinfo -h -N -o %T", lambda out: set(out.split()) == {"idle"})

    def stop(self) -> None:
        """Cancel what still runs, and end the daemons that were started here, the last first."""
        try:
            subprocess.run(["scancel", "-u", "root"], env=self.environment, timeout=30, check=False)
            time.sleep(1)
        finally:
            while self._daemons:
                _end(self._daemons.pop())

    def run(self, *words: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def _configure(self, ports: dict[str, int]) -> None:
        facts = {"folder": self.folder, "host": self.host, **ports}
        nodes = "".join(NODE.format(name=name, host=self.host, port=ports[name]) for name in NODES)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**facts) + nodes + PARTITIONS)
        accounting = self.folder / "slurmdbd.conf"
        accounting.write_text(ACCOUNTING.format(**facts))
        accounting.chmod(0o600)
        self._port = ports["database"]

    def _munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        folder.chmod(0o711)
        files = [f"--{name}={folder / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._daemon("munged", "--foreground", f"--key-file={key}", *files, user="munge")
        self._wait(lambda: (folder / "socket").exists(), "munged")

    def _database(self) -> None:
        data = self.folder / "db"
        made = ["mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db"]
        made.append("--auth-root-authentication-method=normal")
        subprocess.run(made, capture_output=True, check=True, timeout=120)
        options = [
            f"--datadir={data}",
            f"--socket={data}/s",
            f"--port={self._port}",
            f"--pid-file={data}/pid",
        ]
        options += [
            f"--port={self._port}",
            "--user=mysql",
            "--bind-address=127.0.0.1",
            "--innodb-buffer-pool-size=64M",
        ]
        self._daemon("mariadbd", "--no-defaults", *options)
        grant = "CREATE DATABASE slurm; CREATE USER 'slurm'@'%' IDENTIFIED BY 'slurm';"
        grant += "CREATE USER 'slurm'@'localhost' IDENTIFIED BY 'slurm';"
        grant += "GRANT ALL ON slurm.* TO 'slurm'@'%'; GRANT ALL ON slurm.* TO 'slurm'@'localhost';"
        command = ["mariadb", "--no-defaults", "-u", "root", f"--socket={data}/s", "-e"]
        self._wait(lambda: _succeeds([*command, "SELECT 1"]), "mariadbd")
        subprocess.run([*command, grant], check=True, capture_output=True, timeout=30)

    def _daemon(self, *words: str, user: str | None = None, **environment: str) -> None:
        with open(self.folder / f"log/{words[0]}.out", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    env={**self.environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    user=user,
                    group=user,
                    start_new_session=True,
                )
            )

    def _until(self, command: str, good) -> None:
        def asked() -> bool:
            done = subprocess.run(
                command.split(), env=self.environment, capture_output=True, text=True, check=False
            )
            return done.returncode == 0 and good(done.stdout)

        self._wait(asked, command)

    def _wait(self, ready, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-800:] for path in self.folder.glob("log/*"))
                raise TimeoutError(f"{what} is not ready after {seconds:.0f} s: {logs}")
            time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """End a daemon, and kill it where it takes long or the wait is interrupted."""
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        pass
    finally:
        daemon.kill()
        daemon.wait()


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
