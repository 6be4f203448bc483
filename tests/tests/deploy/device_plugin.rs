//! The device plugin for Kubernetes between a real daemon on softgpu and a kubelet of this test's.

use crate::kubelet::{Connection, Kubelet};
use mpsshim_device_plugin::api::{
    AllocateRequest, Allocation, CdiDevice, ContainerAllocateRequest, ContainerAllocation,
    ContainerPreferenceRequest, Devices, Empty, HEALTHY, Mount, Options, Preference,
    PreferenceRequest, RegisterRequest, UNHEALTHY, path,
};
use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Done, Place, other_user, wait_until};
use mpsshim_tests::scene::daemon_with;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tonic::Code;

const SOCKET: &str = "mpsshim.io_gpu.sock";
/// Where containers have the library and the sockets.
const LIBRARY: &str = "/usr/lib/mpsshim/libmpsshim.so";
const SOCKETS: &str = "/run/mpsshim";

/// A daemon with two GPUs of 1 GiB.
fn two_gpus() -> Place {
    daemon_with(&[("SOFTGPU_DEVICES", "2"), ("SOFTGPU_MEMORY", "1G")])
}

/// Their UUIDs.
fn uuids(place: &Place) -> [String; 2] {
    let told = place.control(&["--format", "json", "device_query"]);
    let rows: Value = serde_json::from_str(&told.out).expect("JSON");
    [0, 1].map(|row| rows[row]["uuid"].as_str().expect("a UUID").to_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The plugin as a process; it ends with the value.
struct Plugin {
    child: Child,
    socket: PathBuf,
    errors: PathBuf,
}

impl Plugin {
    fn command(place: &Place, folder: &Path, options: &[&str]) -> Command {
        let mut command = place.command("mps-device-plugin");
        command.env("MPSSHIM_LIBRARY", artifact("libmpsshim.so"));
        if !options.contains(&"--interval") {
            command.args(["--interval", "0.1"]);
        }
        command.arg("--kubelet-dir").arg(folder).args(options);
        command
    }

    fn start(place: &Place, folder: &Path, options: &[&str]) -> Plugin {
        let errors = place.path().join("plugin.log");
        let log = fs::File::create(&errors).expect("log");
        let mut command = Plugin::command(place, folder, options);
        let child = command.stdout(Stdio::null()).stderr(log).spawn();
        Plugin {
            child: child.expect("run"),
            socket: folder.join(SOCKET),
            errors,
        }
    }

    /// One that does not start: what it says, and its exit status.
    fn refused(place: &Place, folder: &Path, options: &[&str]) -> (i32, String) {
        let output = Plugin::command(place, folder, options).output();
        let done = Done::from(output.expect("run"));
        assert_eq!(done.out, "");
        (done.code, done.err)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("signal");
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.errors).expect("log")
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kubelet, a plugin that it knows, and a connection to that.
fn known(place: &Place, options: &[&str]) -> (Kubelet, Plugin, Connection) {
    let kubelet = Kubelet::start();
    let plugin = Plugin::start(place, kubelet.folder(), options);
    let endpoint = kubelet.registered().endpoint;
    let connection = Connection::open(&kubelet.folder().join(endpoint));
    (kubelet, plugin, connection)
}

fn ids(gpu: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
    let numbers = numbers.into_iter();
    numbers.map(|number| format!("{gpu}::{number}")).collect()
}

fn allocate(
    connection: &Connection,
    ids: Vec<String>,
) -> Result<ContainerAllocation, tonic::Status> {
    let containers = vec![ContainerAllocateRequest { ids }];
    let allocated = connection.ask(path::ALLOCATE, AllocateRequest { containers });
    allocated.map(|mut allocated: Allocation| allocated.containers.remove(0))
}

fn environment(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    of.iter().map(owned).collect()
}

/// The health of all, if it is the same.
fn health(devices: &Devices) -> Option<&str> {
    let first = &devices.devices.first()?.health;
    let all = devices.devices.iter().all(|device| device.health == *first);
    all.then_some(first)
}

#[test]
fn kubelet_learns_of_the_parts_and_is_told_what_a_container_needs() {
    let place = two_gpus();
    let [first, second] = uuids(&place);
    let kubelet = Kubelet::start();
    let _plugin = Plugin::start(&place, kubelet.folder(), &["--parts", "8"]);
    let options = Options {
        pre_start_required: false,
        preferred_allocation_available: true,
    };
    let expected = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: SOCKET.into(),
        resource_name: "mpsshim.io/gpu".into(),
        options: Some(options),
    };
    assert_eq!(kubelet.registered(), expected);
    let connection = Connection::open(&kubelet.folder().join(SOCKET));
    assert_eq!(connection.ask(path::OPTIONS, Empty {}).ok(), Some(options));

    let devices: Devices = connection.watch(path::LIST_AND_WATCH).next();
    let listed: Vec<&str> = devices.devices.iter().map(|device| &*device.id).collect();
    assert_eq!(listed, [ids(&first, 0..8), ids(&second, 0..8)].concat());
    assert_eq!(health(&devices), Some(HEALTHY));

    // Three are left of one and five of the other.
    let ask = ContainerPreferenceRequest {
        available: [ids(&first, 3..8), ids(&second, [1, 4, 6])].concat(),
        must_include: Vec::new(),
        size: 3,
    };
    let asked = PreferenceRequest {
        containers: vec![ask.clone(), ContainerPreferenceRequest { size: 4, ..ask }],
    };
    let preferred: Preference = connection.ask(path::PREFERENCE, asked).expect("preference");
    let preferred: Vec<_> = preferred
        .containers
        .into_iter()
        .map(|one| one.ids)
        .collect();
    assert_eq!(preferred, [ids(&second, [1, 4, 6]), ids(&first, 3..7)]);

    let pipe = place.pipe().to_str().expect("UTF-8").to_owned();
    let library = artifact("libmpsshim.so").canonicalize().expect("library");
    let mount = |container_path: &str, host_path: &str| Mount {
        container_path: container_path.into(),
        host_path: host_path.into(),
        read_only: true,
    };
    let given = |gpu: &str, percentage: &str, memory: &str| ContainerAllocation {
        env: environment(&[
            ("LD_PRELOAD", LIBRARY),
            ("MPSSHIM_PIPE_DIRECTORY", SOCKETS),
            ("NVIDIA_VISIBLE_DEVICES", gpu),
            ("CUDA_VISIBLE_DEVICES", gpu),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory),
        ]),
        mounts: vec![mount(LIBRARY, text(&library)), mount(SOCKETS, &pipe)],
        cdi_devices: Vec::new(),
    };
    let asked = AllocateRequest {
        containers: vec![
            ContainerAllocateRequest {
                ids: ids(&second, [7, 0, 3]),
            },
            ContainerAllocateRequest {
                ids: ids(&first, 0..8),
            },
        ],
    };
    let allocated: Allocation = connection.ask(path::ALLOCATE, asked).expect("allocation");
    assert_eq!(
        allocated.containers,
        [
            given(&second, "37", "0=384M"),
            given(&first, "100", "0=1024M")
        ]
    );

    let several = [ids(&first, 0..2), ids(&second, 5..6)].concat();
    for (ids, code, why) in [
        (several, Code::InvalidArgument, "parts of one GPU only"),
        (vec![], Code::InvalidArgument, "no part of a GPU"),
        (vec!["x".into()], Code::InvalidArgument, "x is not a part"),
        (ids("GPU-x", 0..1), Code::NotFound, "no GPU GPU-x"),
    ] {
        let refused = allocate(&connection, ids).expect_err(why);
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(why), "{refused}");
    }
    let asked = ContainerAllocateRequest { ids: vec![] };
    assert!(connection.ask::<_, Empty>(path::PRE_START, asked).is_ok());
    let other = connection.ask::<_, Empty>("/v1beta1.DevicePlugin/Other", Empty {});
    assert_eq!(other.expect_err("no such call").code(), Code::Unimplemented);
}

#[test]
fn limits_and_ways_of_giving_can_be_chosen() {
    let place = two_gpus();
    let [gpu, _] = uuids(&place);
    let devices = [
        ("NVIDIA_VISIBLE_DEVICES", &*gpu),
        ("CUDA_VISIBLE_DEVICES", &gpu),
    ];
    let options = ["--cdi", "--no-memory-limit", "--no-thread-percentage"];
    let (_kubelet, _plugin, connection) = known(&place, &options);
    let expected = ContainerAllocation {
        env: environment(&devices),
        mounts: Vec::new(),
        cdi_devices: vec![CdiDevice {
            name: "mpsshim.io/gpu=all".into(),
        }],
    };
    assert_eq!(allocate(&connection, ids(&gpu, 0..1)).ok(), Some(expected));

    let file = place.path().join("ld.so.preload");
    fs::write(&file, "what a former release wrote").expect("write");
    let options = [
        "--ld-so-preload",
        text(&file),
        "--resource",
        "a.example/half",
    ];
    let (kubelet, _plugin, connection) = known(&place, &options);
    assert!(kubelet.folder().join("a.example_half.sock").exists());
    let given = allocate(&connection, ids(&gpu, 0..2)).expect("allocation");
    assert!(!given.env.contains_key("LD_PRELOAD"), "{given:?}");
    assert_eq!(given.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "2");
    let mounts = given.mounts.iter();
    let mounts: Vec<_> = mounts
        .map(|one| (&*one.container_path, one.read_only))
        .collect();
    let expected = [LIBRARY, SOCKETS, "/etc/ld.so.preload"].map(|path| (path, true));
    assert_eq!(mounts, expected);
    assert_eq!(given.mounts[2].host_path, text(&file));
    let written = fs::read_to_string(&file).expect("file");
    assert_eq!(written, format!("{LIBRARY}\n"));
}

/// A program with a container's environment and nothing else, at this machine's paths.
fn contained(place: &Place, given: &ContainerAllocation, command: &mut Command) {
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
    // As the container's driver sees the GPUs.
    command
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .env("SOFTGPU_DEVICES", "2")
        .env("SOFTGPU_MEMORY", "1G");
    for (name, value) in &given.env {
        let mount = given.mounts.iter().find(|one| one.container_path == *value);
        let here = mount.map_or(value, |mount| &mount.host_path);
        command.env(name, here);
    }
    command.current_dir(place.path());
    command.stdout(Stdio::null()).stderr(Stdio::null());
}

const BENCHMARK: [&str; 3] = ["-benchmark", "-numbodies=1024", "-i=1000000"];

/// Whether the program is a client with this share of this GPU.
#[track_caller]
fn is_a_client(place: &Place, mut command: Command, gpu: &str, percentage: &str, memory: u64) {
    let mut child = command.spawn().expect("run");
    let mut rows = Vec::new();
    wait_until("the program is a client", || {
        rows = place.ps();
        // Of the device that it uses there is memory.
        rows.iter()
            .any(|row| row["memory"] != "0" && !row["memory"].is_empty())
    });
    child.kill().expect("kill");
    child.wait().expect("wait");
    for row in rows {
        assert_eq!(row["active_thread_percentage"], percentage, "{row:?}");
        let is_ours = row["uuid"] == gpu;
        let limit = if is_ours {
            memory.to_string()
        } else {
            String::new()
        };
        assert_eq!(row["memory_limit"], limit, "{row:?}");
        assert_eq!(row["memory"] != "0", is_ours, "{row:?}");
    }
}

#[test]
fn what_a_container_is_given_makes_its_program_a_client() {
    let place = two_gpus();
    let [_, gpu] = uuids(&place);
    let (_kubelet, _plugin, connection) = known(&place, &[]);
    let given = allocate(&connection, ids(&gpu, 10..43)).expect("allocation");
    let mut nbody = Command::new(artifact("nbody"));
    nbody.args(BENCHMARK);
    contained(&place, &given, &mut nbody);
    is_a_client(&place, nbody, &gpu, "33.0", 337 << 20);
}

#[test]
fn a_file_in_etc_makes_it_one_too() {
    let may_mount = || Command::new("unshare").args(["--mount", "true"]).output();
    if other_user().is_none() || !may_mount().is_ok_and(|output| output.status.success()) {
        return eprintln!("no mount namespace can be made: /etc/ld.so.preload is not tested");
    }
    let place = two_gpus();
    let [gpu, _] = uuids(&place);
    let file = place.path().join("ld.so.preload");
    let (_kubelet, _plugin, connection) = known(&place, &["--ld-so-preload", text(&file)]);
    let given = allocate(&connection, ids(&gpu, 0..50)).expect("allocation");
    let script =
        "set -e; cp -a /etc etc; sed \"s|$CONTAINER|$LIBRARY|\" ld.so.preload > etc/ld.so.preload
        mount --bind etc /etc; unset CONTAINER LIBRARY; exec \"$@\"";
    let mut nbody = Command::new("unshare");
    nbody.args(["--mount", "sh", "-c", script, "sh"]);
    nbody.arg(artifact("nbody")).args(BENCHMARK);
    contained(&place, &given, &mut nbody);
    nbody.env("CONTAINER", LIBRARY);
    nbody.env("LIBRARY", &given.mounts[0].host_path);
    is_a_client(&place, nbody, &gpu, "50.0", 512 << 20);
}

#[test]
fn parts_are_healthy_while_the_daemon_answers() {
    let place = two_gpus();
    let [gpu, _] = uuids(&place);
    let (_kubelet, plugin, connection) = known(&place, &["--parts", "2"]);
    let mut watched = connection.watch::<Devices>(path::LIST_AND_WATCH);
    assert_eq!(health(&watched.next()), Some(HEALTHY));

    // Asked ten times a second, the daemon notes it once.
    std::thread::sleep(Duration::from_millis(500));
    let log = place.log("control.log");
    assert_eq!(log.matches("Cmd:get_server_list").count(), 1, "{log}");
    // This test has asked for the devices too.
    assert_eq!(log.matches("Cmd:device_query").count(), 2, "{log}");
    assert_eq!(place.control(&["quit"]).code, 0);
    assert_eq!(health(&watched.next()), Some(UNHEALTHY));
    let refused = allocate(&connection, ids(&gpu, 0..1)).expect_err("no daemon");
    assert_eq!(refused.code(), Code::Unavailable);
    let why = format!("no control daemon in {}", place.pipe().display());
    assert!(refused.message().contains(&why), "{refused}");
    assert!(
        plugin
            .said()
            .contains("Cannot find MPS control daemon process")
    );

    assert_eq!(place.control(&["-d"]).code, 0);
    assert_eq!(health(&watched.next()), Some(HEALTHY));
    assert!(allocate(&connection, ids(&gpu, 0..1)).is_ok());
    assert!(plugin.said().contains("answers again"));

    // One that is there and says nothing.
    place.signal_daemon(Signal::SIGSTOP);
    let stopped = watched.next();
    place.signal_daemon(Signal::SIGCONT);
    assert_eq!(health(&stopped), Some(UNHEALTHY));
    assert_eq!(health(&watched.next()), Some(HEALTHY));
}

#[test]
fn kubelet_hears_nothing_before_the_daemon_is_there() {
    let place = two_gpus();
    assert_eq!(place.control(&["quit"]).code, 0);
    let kubelet = Kubelet::start();
    let plugin = Plugin::start(&place, kubelet.folder(), &[]);
    wait_until("it is said", || {
        plugin
            .said()
            .contains("Cannot find MPS control daemon process")
    });
    assert_eq!(kubelet.registered_within(Duration::from_millis(300)), None);
    assert!(!plugin.socket.exists());
    assert_eq!(place.control(&["-d"]).code, 0);
    assert_eq!(kubelet.registered().endpoint, SOCKET);
}

#[test]
fn a_kubelet_that_starts_anew_is_told_again() {
    let place = two_gpus();
    let folder = tempfile::TempDir::with_prefix("kubelet-").expect("directory");
    // The plugin may be there first.
    let plugin = Plugin::start(&place, folder.path(), &["--parts", "1"]);
    wait_until("it has looked for kubelet", || {
        plugin.said().contains("trying again")
    });
    let mut kubelet = Kubelet::start_in(folder.path());
    for _ in 0..3 {
        assert_eq!(kubelet.registered().endpoint, SOCKET);
        let connection = Connection::open(&plugin.socket);
        let mut watched = connection.watch::<Devices>(path::LIST_AND_WATCH);
        assert_eq!(watched.next().devices.len(), 2);
        // It removes the plugins' sockets, as kubelet does.
        kubelet.end();
        kubelet = Kubelet::start_in(folder.path());
    }
    // A kubelet that goes on and listens no more, without a word.
    kubelet.registered();
    let connection = Connection::open(&plugin.socket);
    let mut watched = connection.watch::<Devices>(path::LIST_AND_WATCH);
    assert_eq!(watched.next().devices.len(), 2);
    // Other rights do not make it another socket.
    fs::set_permissions(&plugin.socket, fs::Permissions::from_mode(0o600)).expect("mode");
    assert_eq!(kubelet.registered_within(Duration::from_millis(1500)), None);
    drop(watched);
    drop(connection);
    kubelet.registered();
}

#[test]
fn a_signal_ends_it_and_its_socket() {
    let place = two_gpus();
    let (kubelet, mut plugin, connection) = known(&place, &["--parts", "1"]);
    let mut watched = connection.watch::<Devices>(path::LIST_AND_WATCH);
    assert_eq!(watched.next().devices.len(), 2);
    let (code, err) = Plugin::refused(&place, kubelet.folder(), &[]);
    assert!(
        code == 1 && err.contains("another device plugin listens at"),
        "{err}"
    );
    plugin.signal(Signal::SIGTERM);
    assert!(plugin.child.wait().expect("wait").success());
    assert!(!plugin.socket.exists());

    // What a killed one leaves is in nobody's way.
    let killed = Plugin::start(&place, kubelet.folder(), &[]);
    kubelet.registered();
    drop(killed);
    assert!(plugin.socket.exists());
    let mut next = Plugin::start(&place, kubelet.folder(), &[]);
    kubelet.registered();
    next.signal(Signal::SIGINT);
    assert!(next.child.wait().expect("wait").success());
    assert!(!plugin.socket.exists());
}

#[test]
fn what_is_wrong_is_said() {
    let place = two_gpus();
    let kubelet = Kubelet::start_that_refuses("no such resource name");
    let folder = kubelet.folder();
    let (code, err) = Plugin::refused(&place, folder, &[]);
    let refused = "mps-device-plugin: kubelet refuses mpsshim.io/gpu: no such resource name\n";
    assert!(code == 1 && err.ends_with(refused), "{code}: {err}");
    assert!(!folder.join(SOCKET).exists());

    let file = folder.join("file");
    fs::write(&file, "").expect("write");
    let below = file.join("ld.so.preload");
    for (options, expected, why) in [
        (&["--parts", "0"][..], 2, "1..=1000"),
        (&["--parts", "1001"], 2, "1..=1000"),
        (&["--parts", "x"], 2, "--parts"),
        (&["--resource", "gpu"], 2, "such as mpsshim.io/gpu"),
        (&["--interval", "0"], 2, "0.1 to 3600"),
        (
            &["--cdi", "--ld-so-preload", "/x"],
            2,
            "cannot be used with",
        ),
        (&["--ld-so-preload", "x"], 1, "give an absolute path"),
        (&["--ld-so-preload", text(&below)], 1, "cannot write"),
        (&["--config", "/nowhere.toml"], 1, "/nowhere.toml"),
        (&["more"], 2, "unexpected argument"),
    ] {
        let (code, err) = Plugin::refused(&place, folder, options);
        assert!(
            code == expected && err.contains(why),
            "{options:?}: {code}: {err}"
        );
    }
    let (code, err) = Plugin::refused(&place, Path::new("/nowhere"), &[]);
    let why = "mps-device-plugin: there is no folder /nowhere: kubelet has it on a node";
    assert!(code == 1 && err.starts_with(why), "{err}");

    let mut command = Plugin::command(&place, folder, &[]);
    command.env("MPSSHIM_LIBRARY", "/nowhere/libmpsshim.so");
    let done = Done::from(command.output().expect("run"));
    assert!(
        done.err
            .contains("cannot find the library /nowhere/libmpsshim.so"),
        "{}",
        done.err
    );
    assert_eq!(done.code, 1);
}

#[test]
fn it_describes_itself() {
    let tell = |option: &[&str]| {
        let output = Command::new(artifact("mps-device-plugin"))
            .args(option)
            .output();
        let done = Done::from(output.expect("run"));
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{option:?}");
        done.out
    };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        tell(&["--version"]),
        format!("mps-device-plugin {version}\n")
    );
    assert!(tell(&["--help"]).contains("--no-memory-limit"));
    assert!(tell(&["--man"]).contains(".TH mps-device-plugin 1"));
    assert!(tell(&["--completions", "bash"]).contains("--kubelet-dir"));
}
