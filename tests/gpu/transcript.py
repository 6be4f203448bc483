#!/usr/bin/env python3
"""The commands of tests/fixtures/control/transcript.txt, given to mps-control and to nvidia-cuda-mps-control.

    tests/gpu/transcript.py --build target/release --client target/release/client work [--only mpsshim]

Runs the transcript once under each system with directories of its own and prints where mps-control's answers or log
lines are not as the transcript has them (exit status 1 then), and where the two systems differ. The client is a program
that prints a line when it has begun to use the GPU and goes on until it is killed, such as `client work`, which
`cargo build --release -p mpsshim-tests --bin client` builds.
"""
import argparse, os, pathlib, re, shutil, signal, subprocess, sys, tempfile, time

TRANSCRIPT = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "control" / "transcript.txt"
PATIENCE = 30


def steps(text):
    """The transcript's steps: ("command", line, [expected lines]), ("do", words, []) or ("log", (file, text), [])."""
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("> "):
            found.append(("command", line[2:], []))
        elif line.startswith("@"):
            found.append(("do", line[1:].split(), []))
        elif line.startswith("log "):
            found.append(("log", tuple(line[4:].split(" ", 1)), []))
        else:
            found[-1][2].append(line)
    return found


def fits(expected, line):
    """Whether a line is as expected; {*} stands for anything, runs of spaces are one."""
    squeeze = lambda text: " ".join(text.split())
    parts = [re.escape(squeeze(part)) for part in expected.split("{*}")]
    return re.fullmatch(r"\s*" + r"\s*.*\s*".join(parts) + r"\s*", squeeze(line)) is not None


class System:
    """One control daemon with its directories and the names of what is on this machine."""

    def __init__(self, name, control, prefix, folder, preload=None, env=()):
        self.name, self.control, self.preload = name, control, preload
        self.pipe, self.log = os.path.join(folder, name, "pipe"), os.path.join(folder, name, "log")
        os.makedirs(self.pipe)
        os.makedirs(self.log)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_MPS_", "MPSSHIM_")) and k != "LD_PRELOAD"}
        # Nothing listens there: a client of ours joins no other MPS on this machine.
        kept["CUDA_MPS_PIPE_DIRECTORY"] = os.path.join(folder, "none")
        self.env = dict(kept, **{f"{prefix}PIPE_DIRECTORY": self.pipe, f"{prefix}LOG_DIRECTORY": self.log}, **dict(env))
        self.names, self.client = {"uid": str(os.getuid())}, None

    def start(self):
        with open(os.path.join(self.log, "daemon.out"), "w") as out:
            # Not through a pipe: a daemon may keep its standard output.
            status = subprocess.run([self.control, "-d"], env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                    timeout=PATIENCE).returncode
        if status != 0:
            sys.exit(f"{self.control} -d ended with {status}: {open(out.name).read().strip()}")

    def ask(self, command):
        done = subprocess.run([self.control], env=self.env, input=command + "\n", stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, timeout=4 * PATIENCE)
        # Empty lines only set parts apart.
        return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]

    def learn_device(self):
        """Name, UUID and address of the first device from device_query --csv."""
        for line in self.ask("device_query --csv"):
            fields = line.split(",")
            if fields[0] == "0" and len(fields) >= 4:
                pci, uuid, name = fields[1:4]
                domain, bus, device = pci.split(":")[0], pci.split(":")[1].split(".")[0], pci.split(".")[1]
                self.names |= {"pci": pci, "uuid": uuid, "short": uuid[:22], "name": name, "bus": f"{bus}:{device}.0"}
                return
        sys.exit(f"{self.name}: device_query lists no device")

    def wait(self, what, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"{self.name}: waited in vain until {what}")
            time.sleep(0.05)

    def clients(self):
        return [line for line in self.ask(f"get_client_list {self.names['server']}") if line.isdigit()]

    def do(self, words, client):
        if words[0] == "server":
            self.ask(f"start_server -uid {self.fill(words[1])}")
            self.wait("there is a server", lambda: any(line.isdigit() for line in self.ask("get_server_list")))
            server = self.names["server"] = self.ask("get_server_list")[0]
            self.wait("it is active", lambda: self.ask(f"get_server_status {server}") == ["ACTIVE"])
        elif words[0] == "client":
            env = dict(self.env, **({"LD_PRELOAD": self.preload} if self.preload else {}))
            self.client = subprocess.Popen(client, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                           start_new_session=True)
            if not self.client.stdout.readline():
                sys.exit(f"{self.name}: {client[0]} ended early")
            self.names["client"] = str(self.client.pid)
            self.wait("the client is listed", lambda: self.clients())
        elif words[0] == "end":
            self.end_client()
            self.wait("no client is listed", lambda: not self.clients())

    def end_client(self):
        if self.client:
            try:
                os.killpg(self.client.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.client.wait()
            self.client = None

    def fill(self, text):
        for name, value in self.names.items():
            text = text.replace("{" + name + "}", value)
        return text

    def unfill(self, line):
        """The line with names for what differs between two runs, so that runs can be compared."""
        for name in ("server", "client"):
            if name in self.names:
                line = re.sub(rf"\b{self.names[name]}\b", "{" + name + "}", line)
        return re.sub(r"\s+", " ", line).strip()

    def log_lines(self, name):
        path = os.path.join(self.log, name)
        with open(path, errors="replace") as file:
            return [line.split("] ", 1)[-1].rstrip() for line in file]

    def stop(self):
        self.end_client()
        try:
            subprocess.run([self.control], env=self.env, input="quit -t 1\n", text=True, timeout=PATIENCE,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            print(f"{self.name}: quit did not end", file=sys.stderr)


def run(system, transcript, client):
    """The answers, and for each log line of the transcript whether it is there."""
    answers, logs, seen = [], [], {}
    system.start()
    try:
        system.learn_device()
        for kind, what, expected in transcript:
            if kind == "command":
                command = system.fill(what)
                answer = system.ask(command)
                wanted = [system.fill(line) for line in expected]
                well = len(answer) == len(wanted) and all(map(fits, wanted, answer))
                answers.append((what, [system.unfill(line) for line in answer], expected, well))
            elif kind == "do":
                system.do(what, client)
            else:
                name, text = what
                time.sleep(0 if name in seen else 1)
                lines, start = system.log_lines(name), seen.get(name, 0)
                at = next((i for i in range(start, len(lines)) if fits(system.fill(text), lines[i])), None)
                seen[name] = start if at is None else at + 1
                logs.append((name, text, at is not None))
    finally:
        system.stop()
    return answers, logs


def indented(lines):
    return "\n".join("        " + line for line in lines) or "        (nothing)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release", help="folder with mps-control, mps-server, libmpsshim.so")
    parser.add_argument("--nvidia", default="nvidia-cuda-mps-control", help="NVIDIA's control program")
    parser.add_argument("--cuda-library", help="the genuine driver, for mpsshim")
    parser.add_argument("--only", choices=["mpsshim", "nvidia"], help="one system alone")
    parser.add_argument("--keep", help="folder for pipe directories and logs; otherwise a temporary one")
    parser.add_argument("--client", nargs=argparse.REMAINDER, help="the program and its arguments (last option)")
    options = parser.parse_args()
    build = os.path.abspath(options.build)
    client = options.client or [os.path.join(build, "client"), "work"]
    transcript = steps(TRANSCRIPT.read_text())
    folder = options.keep or tempfile.mkdtemp(prefix="mps-")
    results, wrong = {}, 0
    try:
        for name in [options.only] if options.only else ["nvidia", "mpsshim"]:
            if name == "nvidia":
                system = System(name, options.nvidia, "CUDA_MPS_", folder)
            else:
                env = {"MPSSHIM_CUDA_LIBRARY": options.cuda_library} if options.cuda_library else {}
                preload = os.path.join(build, "libmpsshim.so")
                system = System(name, os.path.join(build, "mps-control"), "MPSSHIM_", folder, preload, env)
            results[name] = run(system, transcript, client)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if "mpsshim" in results:
        answers, logs = results["mpsshim"]
        print("== mpsshim against the transcript")
        for command, answer, expected, well in answers:
            if not well:
                wrong += 1
                print(f"    > {command}\n      expected\n{indented(expected)}\n      said\n{indented(answer)}")
        for name, text, found in logs:
            if not found:
                wrong += 1
                print(f"    {name} has no line: {text}")
        print(f"    {len(answers)} commands and {len(logs)} log lines, {wrong} not as expected")
    if len(results) == 2:
        print("== differences between NVIDIA's and mpsshim")
        differing = 0
        for theirs, ours in zip(results["nvidia"][0], results["mpsshim"][0]):
            # The context number and the program's path may differ; where both fit, they do not count.
            if theirs[1] != ours[1] and not (theirs[3] and ours[3]):
                differing += 1
                print(f"    > {theirs[0]}\n      NVIDIA\n{indented(theirs[1])}\n      mpsshim\n{indented(ours[1])}")
        for theirs, ours in zip(results["nvidia"][1], results["mpsshim"][1]):
            if theirs[2] != ours[2]:
                differing += 1
                print(f"    {theirs[0]}: {'mpsshim' if ours[2] else 'NVIDIA'} alone writes: {theirs[1]}")
        print(f"    {differing} differences")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
