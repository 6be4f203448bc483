//! The manifests in packaging/kubernetes: against the schemas of Kubernetes, against what they speak of, and their
//! containers' commands as processes of this machine, under the users and capabilities that the manifests give them.

use crate::kubelet::{Connection, Kubelet};
use mpsshim_device_plugin::api::{
    AllocateRequest, Allocation, ContainerAllocateRequest, ContainerAllocation,
    ContainerPreferenceRequest, Devices, Preference, PreferenceRequest, path,
};
use mpsshim_tests::artifacts::{artifact, driver, target};
use mpsshim_tests::control_daemon::{Done, other_user, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const MANIFESTS: [&str; 5] = [
    "namespace.yaml",
    "config.yaml",
    "daemonset.yaml",
    "nbody.yaml",
    "nbody-share.yaml",
];
/// The manifests that no kustomization applies.
const EXAMPLES: [&str; 2] = ["nbody.yaml", "nbody-share.yaml"];
/// What a container asks for.
const SHARE: &str = "/resources/limits/mpsshim.io~1gpu";
/// The oldest and the newest that the checker of scripts/test.sh has.
const VERSIONS: [&str; 2] = ["1.25", "1.37"];
const POD: &str = "/spec/template/spec";
const ANNOTATIONS: &str = "/spec/template/metadata/annotations";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn folder() -> PathBuf {
    root().join("packaging/kubernetes")
}

fn text(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect(path)
}

/// A program of the environment that scripts/test.sh makes; `None`: it could not.
fn tool(name: &str) -> Option<Command> {
    let path = target().join("kubernetes-validate/bin").join(name);
    if !path.exists() {
        eprintln!("no kubernetes-validate: scripts/test.sh installs it; not tested");
        return None;
    }
    Some(Command::new(path))
}

/// What the checker says of a file for a version of Kubernetes.
fn check(version: &str, file: &Path) -> Option<Done> {
    let mut checker = tool("kubernetes-validate")?;
    let checker = checker.args(["--strict", "-k", version]).arg(file);
    Some(checker.output().expect("run").into())
}

/// A manifest as JSON.
fn manifest(name: &str) -> Option<Value> {
    let script = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)";
    let mut python = tool("python")?;
    let asked = python.args(["-c", script]).arg(folder().join(name));
    let done = Done::from(asked.output().expect("run"));
    assert_eq!(done.code, 0, "{name}: {}", done.err);
    Some(serde_json::from_str(&done.out).expect("JSON"))
}

fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    let found = value.pointer(path);
    found.unwrap_or_else(|| panic!("no {path} in {value}"))
}

fn said<'a>(value: &'a Value, path: &str) -> &'a str {
    at(value, path).as_str().expect(path)
}

/// The elements of a list; none where there is no list.
fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn containers(workload: &Value) -> impl Iterator<Item = &Value> {
    let pod = at(workload, POD);
    list(pod, "initContainers").chain(list(pod, "containers"))
}

fn container<'a>(workload: &'a Value, name: &str) -> &'a Value {
    let found = containers(workload).find(|container| container["name"] == name);
    found.unwrap_or_else(|| panic!("no container {name}"))
}

/// Names of settings in a text.
fn settings_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names = words.filter(|word| word.starts_with("MPSSHIM_") || word.starts_with("CUDA_MPS_"));
    names.map(str::to_owned).collect()
}

#[test]
fn the_schemas_of_kubernetes_take_the_manifests_and_not_wrong_ones() {
    for version in VERSIONS {
        for name in MANIFESTS {
            let Some(done) = check(version, &folder().join(name)) else {
                return;
            };
            assert_eq!(done.code, 0, "{}", done.out);
            // What has no schema is only warned of.
            assert!(done.out.contains(" passed "), "{name}: {}", done.out);
        }
    }
    let place = TempDir::with_prefix("kubernetes-").expect("directory");
    let wrong = place.path().join("wrong.yaml");
    for (right, changed) in [
        ("updateStrategy:", "updateStrategies:"),
        ("runAsUser: 0", "runAsUser: root"),
        ("kind: DaemonSet", "kind: DaemonSets"),
        ("- name: install\n", "- title: install\n"),
    ] {
        let manifest = text("packaging/kubernetes/daemonset.yaml");
        assert!(manifest.contains(right));
        fs::write(&wrong, manifest.replacen(right, changed, 1)).expect("write");
        let done = check(VERSIONS[1], &wrong).expect("there is a checker");
        assert!(!done.out.contains(" passed "), "{changed}: {}", done.out);
    }
}

#[test]
fn the_manifests_name_what_there_is() {
    let Some(kustomization) = manifest("kustomization.yaml") else {
        return;
    };
    let mut resources: Vec<&str> = list(&kustomization, "resources")
        .map(|name| name.as_str().expect("a name"))
        .collect();
    resources.extend(EXAMPLES);
    assert_eq!(resources, MANIFESTS);

    let table = text("docs/settings.md");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| "));
    let known: BTreeSet<_> = rows
        .flat_map(|row| settings_in(row.split(' ').next().expect("a word")))
        .collect();
    let builds = text("scripts/images.sh");
    let images: Vec<&str> = builds
        .lines()
        .filter_map(|line| line.strip_prefix("build ")?.split(' ').nth(1))
        .collect();
    assert_eq!((known.is_empty(), images.len()), (false, 2));
    let dockerfile = text("packaging/containers/Dockerfile");

    for name in ["daemonset.yaml"].into_iter().chain(EXAMPLES) {
        let workload = manifest(name).expect("there is a reader");
        let volumes: Vec<&Value> = list(at(&workload, POD), "volumes").collect();
        for container in containers(&workload) {
            let image = said(container, "/image");
            assert!(images.contains(&image), "{name}: {image}");
            for variable in list(container, "env") {
                let variable = said(variable, "/name");
                let there = known.contains(variable)
                    || variable == "LD_PRELOAD"
                    || variable.starts_with("NVIDIA_") && dockerfile.contains(variable);
                assert!(there, "{name}: {variable}");
            }
            for mount in list(container, "volumeMounts") {
                let volume = volumes.iter().find(|one| one["name"] == mount["name"]);
                let volume = volume.unwrap_or_else(|| panic!("{name}: no volume of {mount}"));
                // Paths in what is written for the node's engine are the node's.
                if let Some(path) = volume.pointer("/hostPath/path") {
                    assert_eq!(path, &mount["mountPath"], "{name}");
                }
            }
        }
        if name == "daemonset.yaml" {
            let labels = at(&workload, "/spec/template/metadata/labels");
            assert_eq!(at(&workload, "/spec/selector/matchLabels"), labels);
        }
    }
    let page = settings_in(&text("docs/kubernetes.md"));
    let unknown: Vec<_> = page.difference(&known).collect();
    assert!(unknown.is_empty(), "docs/kubernetes.md: {unknown:?}");
}

#[test]
fn the_configuration_is_accepted_and_leads_to_the_volumes() {
    let Some(config) = manifest("config.yaml") else {
        return;
    };
    let daemon_set = manifest("daemonset.yaml").expect("there is a reader");
    let place = TempDir::with_prefix("kubernetes-").expect("directory");
    let file = place.path().join("config.toml");
    let library = artifact("libmpsshim.so");
    let generate = |config: &str| {
        fs::write(&file, config).expect("write");
        let mut control = Command::new(artifact("mps-control"));
        control.arg("--config").arg(&file).args(["cdi", "generate"]);
        // The one that the file names is there on a node only.
        control.env("MPSSHIM_LIBRARY", &library);
        control.env_remove("MPSSHIM_PIPE_DIRECTORY");
        Done::from(control.output().expect("run"))
    };
    let config = said(&config, "/data/config.toml");
    // The suggestions too are settings.
    let suggestions = config.replace("\n#", "\n").replace("\n ", "\n# ");
    assert_ne!(suggestions, config);
    let done = generate(&suggestions);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let spec: Value = serde_json::from_str(&done.out).expect("JSON");
    let mounts = at(&spec, "/devices/0/containerEdits/mounts");
    let mounts: Vec<&str> = mounts
        .as_array()
        .expect("mounts")
        .iter()
        .map(|one| said(one, "/hostPath"))
        .collect();
    let volume = |name: &str| {
        let mut volumes = list(at(&daemon_set, POD), "volumes");
        let found = volumes.find(|volume| volume["name"] == name);
        said(found.expect(name), "/hostPath/path").to_owned()
    };
    assert!(mounts.contains(&volume("pipe").as_str()), "{mounts:?}");
    let in_volume = format!("library = \"{}/libmpsshim.so\"\n", volume("library"));
    assert!(config.contains(&in_volume), "{config}");

    let done = generate(&format!("{config}pipes = 1\n"));
    assert_eq!(done.code, 1);
    assert!(done.err.contains("unknown key pipes"), "{}", done.err);
}

/// A machine's directory in place of a node's root, and what runs there; it ends with the value.
struct Node {
    folder: TempDir,
    config: Value,
    daemon: Option<Child>,
    /// What was started first ends first.
    others: Vec<Child>,
}

impl Node {
    fn new(config: Value) -> Node {
        let folder = TempDir::with_prefix("node-").expect("directory");
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(folder.path(), open).expect("mode");
        Node {
            folder,
            config,
            daemon: None,
            others: Vec::new(),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// A text with this machine's paths.
    fn here(&self, text: &str) -> String {
        let library = artifact("libmpsshim.so");
        let mut text = text.replace(
            "/usr/lib/mpsshim/libmpsshim.so",
            library.to_str().expect("text"),
        );
        for (path, name) in [
            ("/run/mpsshim", "pipe"),
            ("/var/lib/mpsshim", "library"),
            ("/var/log/mpsshim", "log"),
            ("/var/run/cdi", "cdi"),
            ("/var/lib/kubelet/device-plugins", "kubelet"),
        ] {
            let name = self.path(name);
            text = text.replace(path, name.to_str().expect("text"));
        }
        text
    }

    /// The volumes of a pod, as the kubelet makes them.
    fn mount(&self, workload: &Value) {
        for volume in list(at(workload, POD), "volumes") {
            if volume.get("configMap").is_some() {
                let config = self.here(said(&self.config, "/data/config.toml"));
                fs::write(self.path("config.toml"), config).expect("write");
                continue;
            }
            let log = volume.get("emptyDir").map(|_| "/var/log/mpsshim");
            let path = log.unwrap_or_else(|| said(volume, "/hostPath/path"));
            fs::create_dir_all(self.here(path)).expect("directory");
        }
    }

    /// A container's words as a process with the container's environment, user and capabilities.
    fn command(&self, workload: &Value, container: &Value, words: &[&str]) -> Command {
        let user = at(workload, &format!("{POD}/securityContext/runAsUser"));
        let group = at(workload, &format!("{POD}/securityContext/runAsGroup"));
        let security = &container["securityContext"];
        assert_eq!(security["allowPrivilegeEscalation"], false);
        assert_eq!(at(security, "/capabilities/drop/0"), "ALL");
        let added =
            list(&security["capabilities"], "add").map(|name| name.as_str().expect("a name"));
        let bounds: String = added
            .map(|name| format!(",+{}", name.to_lowercase()))
            .collect();
        let mut command = Command::new("setpriv");
        command
            .args(["--no-new-privs", "--clear-groups", "--inh-caps=-all"])
            .arg(format!("--bounding-set=-all{bounds}"))
            .arg(format!("--reuid={user}"))
            .arg(format!("--regid={group}"));
        command.args(words.iter().map(|word| self.here(word)));
        let programs = artifact("mps-control");
        let programs = programs.parent().expect("a folder").display();
        command
            .env_clear()
            .env("PATH", format!("{programs}:/usr/bin:/bin"))
            .env("MPSSHIM_CUDA_LIBRARY", driver());
        let files = list(container, "volumeMounts").map(|mount| said(mount, "/mountPath"));
        if files.into_iter().any(|path| path == "/etc/mpsshim") {
            command.env("MPSSHIM_CONFIG", self.path("config.toml"));
        }
        for variable in list(container, "env") {
            let value = match variable.get("value") {
                Some(value) => value.as_str().expect("text"),
                None => annotation(workload, said(variable, "/valueFrom/fieldRef/fieldPath")),
            };
            command.env(said(variable, "/name"), self.here(value));
        }
        command
    }

    /// A container's words with the rights, variables and files that kubelet gives it besides.
    fn allocated(&self, workload: &Value, words: &[&str], given: &ContainerAllocation) -> Command {
        let mut command = self.command(workload, container(workload, "nbody"), words);
        for (name, value) in &given.env {
            let mount = given.mounts.iter().find(|one| one.container_path == *value);
            command.env(name, mount.map_or(value, |mount| &mount.host_path));
        }
        command
    }

    /// Has the daemon's pod start as far as its daemon.
    fn start_daemon(&mut self, daemon_set: &Value) {
        let daemon = container(daemon_set, "daemon");
        let mut command = self.command(daemon_set, daemon, &words(daemon));
        let log = fs::File::create(self.path("stderr")).expect("log");
        let started = command.stdout(Stdio::null()).stderr(log).spawn();
        self.daemon = Some(started.expect("run"));
        wait_until("the daemon is ready", || {
            self.probe(daemon_set, "readinessProbe") == 0
        });
    }

    /// What a probe of the daemon comes to.
    fn probe(&self, daemon_set: &Value, name: &str) -> i32 {
        let daemon = container(daemon_set, "daemon");
        let words = at(daemon, &format!("/{name}/exec/command"));
        let words = words.as_array().expect("words").iter();
        let words: Vec<&str> = words.map(|word| word.as_str().expect("a word")).collect();
        finish(self.command(daemon_set, daemon, &words)).code
    }

    /// A command to the daemon.
    fn control(&self, daemon_set: &Value, words: &[&str]) -> Done {
        let daemon = container(daemon_set, "daemon");
        finish(self.command(daemon_set, daemon, &[&["mps-control"], words].concat()))
    }

    /// What `ps` says of the client, once it has limits.
    fn client(&self, daemon_set: &Value) -> Value {
        let mut rows = Value::Null;
        wait_until("the program is a client", || {
            let said = self.control(daemon_set, &["--format", "json", "ps"]);
            rows = serde_json::from_str(&said.out).unwrap_or_default();
            rows[0]["memory_limit"].is_number()
        });
        rows[0].take()
    }

    /// Goes on until the node ends.
    fn spawn(&mut self, mut command: Command) {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.others.push(command.spawn().expect("run"));
    }

    /// Runs a container as it is.
    fn run(&self, workload: &Value, name: &str) -> Done {
        let container = container(workload, name);
        let command = self.command(workload, container, &words(container));
        finish(command)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in self.others.iter_mut().chain(&mut self.daemon) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn words(container: &Value) -> Vec<&str> {
    let words = list(container, "command").chain(list(container, "args"));
    words.map(|word| word.as_str().expect("a word")).collect()
}

fn finish(mut command: Command) -> Done {
    command.output().expect("run").into()
}

/// What `metadata.annotations['KEY']` is for a pod.
fn annotation<'a>(workload: &'a Value, path: &str) -> &'a str {
    let key = path.strip_prefix("metadata.annotations['");
    let key = key.and_then(|key| key.strip_suffix("']")).expect(path);
    at(workload, ANNOTATIONS)[key].as_str().expect(path)
}

/// The daemon's settings; `None` where the manifests cannot be read or their users not be had, which is said.
fn config_for_users() -> Option<Value> {
    let config = manifest("config.yaml")?;
    if other_user().is_none() {
        eprintln!("the manifests' users need root: not tested");
        return None;
    }
    Some(config)
}

#[test]
fn a_daemon_with_these_rights_serves_pods_within_their_limits() {
    let Some(config) = config_for_users() else {
        return;
    };
    // Cargo does not build other packages' programs for a test.
    artifact("mps-server");
    artifact("nbody");
    let daemon_set = manifest("daemonset.yaml").expect("there is a reader");
    let job = manifest("nbody.yaml").expect("there is a reader");
    let mut node = Node::new(config);
    node.mount(&daemon_set);

    let installed = node.run(&daemon_set, "install");
    assert_eq!((installed.code, installed.err.as_str()), (0, ""));
    let spec = fs::read_to_string(node.path("cdi/mpsshim.json")).expect("specification");
    let library = node.path("library/libmpsshim.so");
    assert!(spec.contains(library.to_str().expect("text")), "{spec}");

    // The pod waits for the daemon, however long.
    let wait = container(&job, "wait");
    let mut waiting = node.command(&job, wait, &words(wait));
    waiting.stdout(Stdio::null()).stderr(Stdio::null());
    let mut waiting = waiting.spawn().expect("run");
    assert_ne!(node.probe(&daemon_set, "readinessProbe"), 0);
    assert_eq!(waiting.try_wait().expect("wait"), None);
    node.start_daemon(&daemon_set);
    assert_eq!(node.probe(&daemon_set, "livenessProbe"), 0);
    assert!(waiting.wait().expect("wait").success());

    node.mount(&job);
    let client = container(&job, "nbody");
    let nbody = |node: &Node, arguments: &[&str]| {
        node.command(&job, client, &[&["nbody"], arguments].concat())
    };
    let done = finish(nbody(&node, &["-compare", "-numbodies=512"]));
    assert!(done.out.contains("  OK ("), "{}{}", done.out, done.err);
    let running = nbody(&node, &["-benchmark", "-numbodies=1024", "-i=1000000"]);
    node.spawn(running);
    let row = node.client(&daemon_set);
    let percentage = row["active_thread_percentage"].as_f64();
    assert_eq!(percentage, Some(33.0), "{row}");
    assert_eq!(row["memory_limit"].as_u64(), Some(2 << 30), "{row}");
    let user = at(&job, &format!("{POD}/securityContext/runAsUser"));
    assert_eq!(row["uid"], *user, "{row}");

    // A server of another user that does not answer is killed.
    let server = node.control(&daemon_set, &["get_server_list"]).out;
    let server = Pid::from_raw(server.trim().parse().expect("a process id"));
    kill(server, Signal::SIGSTOP).expect("stop");
    let quit = node.control(&daemon_set, &["quit", "-t", "0"]);
    assert_eq!(quit.code, 0, "{}", quit.err);
    wait_until("the server is gone", || kill(server, None).is_err());
    let mut ended = None;
    wait_until("the daemon has ended", || {
        let daemon = node.daemon.as_mut().expect("started");
        ended = daemon.try_wait().expect("wait");
        ended.is_some()
    });
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}

#[test]
fn a_pod_that_asks_for_parts_is_given_all_that_it_needs() {
    let Some(config) = config_for_users() else {
        return;
    };
    for name in ["mps-server", "mps-device-plugin", "nbody"] {
        artifact(name);
    }
    let daemon_set = manifest("daemonset.yaml").expect("there is a reader");
    let job = manifest("nbody-share.yaml").expect("there is a reader");
    let client = container(&job, "nbody");
    // Nothing in the pod speaks of the sharing but what it asks for.
    assert_eq!(containers(&job).count(), 1);
    let spec = at(&job, POD);
    assert!(spec.get("volumes").is_none() && client.get("env").is_none());
    let size = at(client, SHARE).as_i64().expect("a number");

    let mut node = Node::new(config);
    node.mount(&daemon_set);
    let installed = node.run(&daemon_set, "install");
    assert_eq!((installed.code, installed.err.as_str()), (0, ""));
    let kubelet = Kubelet::start_in(&node.path("kubelet"));
    let plugin = container(&daemon_set, "device-plugin");
    let words = words(plugin);
    assert_eq!(words[..2], ["mps-device-plugin", "--parts=100"]);
    let plugin = node.command(&daemon_set, plugin, &words);
    node.spawn(plugin);
    node.start_daemon(&daemon_set);

    let endpoint = kubelet.registered().endpoint;
    let connection = Connection::open(&node.path("kubelet").join(endpoint));
    let parts: Devices = connection.watch(path::LIST_AND_WATCH).next();
    assert_eq!(parts.devices.len(), 100);
    let preference = ContainerPreferenceRequest {
        available: parts.devices.into_iter().map(|part| part.id).collect(),
        must_include: Vec::new(),
        size: size.try_into().expect("few"),
    };
    let containers = vec![preference];
    let asked = connection.ask(path::PREFERENCE, PreferenceRequest { containers });
    let Preference { mut containers } = asked.expect("preference");
    let ids = containers.remove(0).ids;
    let containers = vec![ContainerAllocateRequest { ids }];
    let asked = connection.ask(path::ALLOCATE, AllocateRequest { containers });
    let Allocation { containers } = asked.expect("allocation");

    let run = ["nbody", "-benchmark", "-numbodies=1024", "-i=1000000"];
    let running = node.allocated(&job, &run, &containers[0]);
    node.spawn(running);
    let row = node.client(&daemon_set);
    let percentage = row["active_thread_percentage"].as_f64();
    assert_eq!(percentage, Some(size as f64), "{row}");
    let memory = row["memory_limit"].as_i64();
    // softgpu's device has 4 GiB.
    assert_eq!(memory, Some((4096 * size / 100) << 20), "{row}");
    let user = at(&job, &format!("{POD}/securityContext/runAsUser"));
    assert_eq!(row["uid"], *user, "{row}");
}
