//! Processes of a device as tools see them that use NVIDIA's management library, on softnvml.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use mpsshim_tests::programs::{Running, finish, preloaded};
use mpsshim_tests::scene::daemon;
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

const PIECE: u64 = 64 << 20;
/// What the server's process holds, as NVML sees it.
const OF_SERVER: u64 = 500 << 20;
const OTHER: u64 = 7 << 20;

/// A daemon, softnvml, and programs that ask it.
struct Scene {
    place: Place,
    folder: TempDir,
    uuid: String,
}

impl Scene {
    fn new() -> Scene {
        let place = daemon();
        let devices = place.control(&["device_query", "--format=csv"]).out;
        let device = devices.lines().nth(1).expect("a device");
        let uuid = device.split(',').nth(3).expect("a UUID").to_owned();
        let folder = TempDir::new().expect("folder");
        symlink(
            artifact("libsoftnvml.so"),
            folder.path().join("libnvidia-ml.so.1"),
        )
        .expect("link");
        let scene = Scene {
            place,
            folder,
            uuid,
        };
        scene.compile("opened", &[]);
        let at = format!("-L{}", scene.folder.path().display());
        scene.compile("linked", &["-DLINKED", &at, "-l:libnvidia-ml.so.1"]);
        scene
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn compile(&self, name: &str, arguments: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/nvml/processes.c");
        let mut cc = Command::new("cc");
        cc.arg("-w").arg("-o").arg(self.file(name)).arg(source);
        cc.args(arguments).arg("-ldl");
        assert!(cc.status().expect("cc is installed").success());
    }

    /// NVML sees the server and another process.
    fn server_holds(&self, bytes: u64) -> u32 {
        let list = self.place.control(&["get_server_list"]).out;
        let server = list.trim().parse().expect("one server");
        let lines = format!(
            "{0} {server} {bytes} 90\n{0} 7 {OTHER}\nGPU-other 8 9\n",
            self.uuid
        );
        fs::write(self.file("processes"), lines).expect("processes");
        server
    }

    /// A program under the library that finds softnvml.
    fn program(&self, name: impl AsRef<Path>, pipe: &Path) -> Command {
        let mut command = preloaded(name.as_ref(), pipe);
        command
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("SOFTNVML_PROCESSES", self.file("processes"));
        command
    }

    /// What a program prints that lists the processes.
    fn list(&self, name: &str) -> Done {
        let mut command = self.program(self.file(name), self.place.pipe());
        finish(command.arg(&self.uuid))
    }

    fn genuine(&self, name: &str) -> String {
        let mut command = self.program(self.file(name), self.place.pipe());
        let done = finish(command.arg(&self.uuid).env_remove("LD_PRELOAD"));
        done.out
    }

    /// A client in that mode that holds so much.
    fn client(&self, mode: &str, bytes: u64) -> Running {
        let mut command = preloaded(env!("CARGO_BIN_EXE_limited"), self.place.pipe());
        command
            .args(["hold", &bytes.to_string()])
            .env("MPSSHIM_MODE", mode);
        Running::start_until(&mut command, "ready")
    }

    /// Waits until `ps` shows clients with this memory.
    fn wait_for(&self, memory: &[u64]) {
        let mut expected: Vec<String> = memory.iter().map(u64::to_string).collect();
        expected.sort();
        wait_until("the clients are listed", || {
            let rows = self.place.ps();
            let mut found: Vec<_> = rows.iter().map(|row| row["memory"].clone()).collect();
            found.sort();
            found == expected
        });
    }
}

/// The line that begins so.
fn line<'a>(text: &'a str, name: &str) -> &'a str {
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    found
        .unwrap_or_else(|| panic!("no {name} in {text}"))
        .trim()
}

/// Seconds that the first query took.
fn took(done: &Done) -> f64 {
    line(&done.err, "took").parse().expect("seconds")
}

#[test]
fn clients_are_processes_of_the_device() {
    let scene = Scene::new();
    let (one, two) = (
        scene.client("proxy", PIECE),
        scene.client("proxy", 2 * PIECE),
    );
    scene.wait_for(&[PIECE, 2 * PIECE]);
    let server = scene.server_holds(OF_SERVER);
    let rest = OF_SERVER - 3 * PIECE;
    for name in ["opened", "linked"] {
        let done = scene.list(name);
        let [one, two] = [(one.pid(), PIECE), (two.pid(), 2 * PIECE)];
        // In the order of the daemon's list.
        let clients = |ending: &str| {
            let mut both = [one, two].map(|(pid, used)| format!("{pid}:{used}{ending}"));
            if !line(&done.out, "v1").contains(&both.join(" ").replace(ending, "")) {
                both.reverse();
            }
            both.join(" ")
        };
        assert_eq!(
            line(&done.out, "v1"),
            format!("0 4 {server}:{rest} 7:{OTHER} {}", clients("")),
            "{name}"
        );
        for version in ["v2", "v3"] {
            assert_eq!(
                line(&done.out, version),
                format!(
                    "0 4 {server}:{rest}:-1:-1 7:{OTHER}:-1:-1 {}",
                    clients(":-1:-1")
                ),
            );
        }
        assert_eq!(line(&done.out, "mps v1"), format!("0 2 {}", clients("")));
        for version in ["mps v2", "mps v3"] {
            assert_eq!(
                line(&done.out, version),
                format!("0 2 {}", clients(":-1:-1"))
            );
        }
        let details: Vec<_> = done
            .out
            .lines()
            .filter_map(|line| line.strip_prefix("details "))
            .collect();
        assert_eq!(
            details,
            [
                format!("0 4 {server}:{rest}:1 7:{OTHER}:1 {}", clients(":0")),
                // Graphics: the stand-in has none, and clients have none.
                "0 0".to_owned(),
                format!("0 2 {}", clients(":0")),
            ]
        );
        assert_eq!(line(&done.out, "needs"), "7 4");
        assert_eq!(line(&done.out, "one"), "7 4");
        assert_eq!(line(&done.out, "null"), "2");
        assert!(!done.out.contains("an error without"), "{}", done.out);
        assert!(!done.out.contains("not there"), "{}", done.out);
        // The clients are idle.
        assert_eq!(
            line(&done.out, "use 0"),
            format!("3 {server}:90 {}:0 {}:0", one.0, two.0)
        );
        assert_eq!(line(&done.out, "use needs"), "7 3");
    }
    // The server's entry is never below zero.
    scene.server_holds(PIECE);
    assert!(line(&scene.list("opened").out, "v1").starts_with(&format!("0 4 {server}:0 7:")));
}

#[test]
fn clients_in_direct_mode_are_not_listed_twice() {
    let scene = Scene::new();
    let proxied = scene.client("proxy", PIECE);
    let direct = scene.client("direct", PIECE);
    scene.wait_for(&[PIECE, PIECE]);
    let server = scene.server_holds(OF_SERVER);
    let lines = fs::read_to_string(scene.file("processes")).expect("processes");
    let context = 300 << 20;
    let lines = format!("{lines}{} {} {context}\n", scene.uuid, direct.pid());
    fs::write(scene.file("processes"), lines).expect("processes");
    assert_eq!(
        line(&scene.list("opened").out, "v1"),
        format!(
            "0 4 {server}:{} 7:{OTHER} {}:{context} {}:{PIECE}",
            OF_SERVER - PIECE,
            direct.pid(),
            proxied.pid()
        )
    );
}

#[test]
fn without_clients_or_a_daemon_the_list_is_nvmls() {
    let scene = Scene::new();
    let mut client = scene.client("proxy", PIECE);
    scene.server_holds(OF_SERVER);
    for name in ["opened", "linked"] {
        let genuine = scene.genuine(name);
        assert_eq!(line(&genuine, "v1").split(' ').nth(1), Some("2"));
        assert_ne!(scene.list(name).out, genuine);
        let elsewhere = scene.file("nowhere");
        let mut command = scene.program(scene.file(name), &elsewhere);
        let done = finish(command.arg(&scene.uuid));
        assert_eq!(done.out, genuine);
        assert!(took(&done) < 0.9, "{}", done.err);
        let mut command = scene.program(scene.file(name), scene.place.pipe());
        let disabled = finish(command.arg(&scene.uuid).env("MPSSHIM_DISABLE", "1"));
        assert_eq!(disabled.out, genuine);
    }
    client.hang_up();
    scene.wait_for(&[]);
    assert_eq!(scene.list("opened").out, scene.genuine("opened"));
}

#[test]
fn a_daemon_that_does_not_answer_costs_a_second() {
    let scene = Scene::new();
    let _client = scene.client("proxy", PIECE);
    scene.server_holds(OF_SERVER);
    scene.place.signal_daemon(Signal::SIGSTOP);
    let done = scene.list("opened");
    let genuine = scene.genuine("opened");
    scene.place.signal_daemon(Signal::SIGCONT);
    assert_eq!(done.out, genuine);
    assert!((1.0..3.0).contains(&took(&done)), "{}", done.err);
}

#[test]
fn a_child_has_a_connection_of_its_own() {
    let scene = Scene::new();
    let client = scene.client("proxy", PIECE);
    scene.wait_for(&[PIECE]);
    let server = scene.server_holds(OF_SERVER);
    let mut command = scene.program(scene.file("opened"), scene.place.pipe());
    let done = finish(command.args([scene.uuid.as_str(), "1"]));
    let expected = format!(
        "0 3 {server}:{} 7:{OTHER} {}:{PIECE}",
        OF_SERVER - PIECE,
        client.pid()
    );
    let lists: Vec<_> = done
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("v1 ").or(line.strip_prefix("parent ")))
        .collect();
    assert_eq!(lists, [expected.as_str(); 3], "{}", done.out);
}

#[test]
fn programs_in_python_see_clients_too() {
    let scene = Scene::new();
    let client = scene.client("proxy", PIECE);
    scene.wait_for(&[PIECE]);
    let server = scene.server_holds(OF_SERVER);
    let script = "
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.getpid() == os.getpid()
nvml = ctypes.CDLL('libnvidia-ml.so.1')
class Process(ctypes.Structure):
    _fields_ = [('pid', ctypes.c_uint), ('used', ctypes.c_ulonglong), ('gpu', ctypes.c_uint), ('compute', ctypes.c_uint)]
device, count = ctypes.c_void_p(), ctypes.c_uint(0)
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByUUID(sys.argv[1].encode(), ctypes.byref(device))
ask = nvml.nvmlDeviceGetComputeRunningProcesses_v3
assert ask(device, ctypes.byref(count), None) == 7
found = (Process * count.value)()
assert ask(device, ctypes.byref(count), found) == 0
print(*(f'{one.pid}:{one.used}' for one in found))
try:
    nvml.nvmlNoSuchFunction
except AttributeError as error:
    assert 'undefined symbol' in str(error), error
";
    let mut python = Command::new("python3");
    python.arg("--version").stdout(Stdio::null());
    if !python.status().is_ok_and(|status| status.success()) {
        eprintln!("no python3: ctypes is not tested");
        return;
    }
    let mut command = scene.program("python3", scene.place.pipe());
    let done = finish(command.args(["-c", script, &scene.uuid]));
    assert_eq!(
        (done.out.trim(), done.err.as_str()),
        (
            format!(
                "{server}:{} 7:{OTHER} {}:{PIECE}",
                OF_SERVER - PIECE,
                client.pid()
            )
            .as_str(),
            ""
        )
    );
}
