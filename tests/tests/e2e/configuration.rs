//! The configuration file, as the daemon, commands and mps-run read it.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, Place};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// A place whose daemon, sockets and logs are where a file says.
struct Configured {
    place: Place,
    file: PathBuf,
}

impl Configured {
    fn new(lines: &str) -> Configured {
        let place = Place::new();
        let file = place.path().join("config.toml");
        let paths = format!(
            "pipe_directory = \"{0}\"\nlog_directory = \"{0}/logs\"\n",
            place.pipe().display()
        );
        fs::write(&file, paths + lines).expect("write");
        Configured { place, file }
    }

    /// A program that is told of the file alone.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(artifact(name));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("MPSSHIM_") || text.starts_with("CUDA_MPS_") {
                command.env_remove(&name);
            }
        }
        command.env("MPSSHIM_SERVER", env!("CARGO_BIN_EXE_fake-server"));
        command.arg("--config").arg(&self.file);
        command
    }

    fn control(&self, arguments: &[&str]) -> Done {
        let mut command = self.command("mps-control");
        command.args(arguments).output().expect("run").into()
    }
}

#[test]
fn the_file_says_what_the_environment_does_not() {
    let set = Configured::new(
        "active_thread_percentage = 25\npinned_device_mem_limit = \"0=2G\"\nlog = \"debug\"\n",
    );
    let started = set.control(&["-d"]);
    assert_eq!((started.code, started.err.as_str()), (0, ""));
    let percentage = set.control(&["get_default_active_thread_percentage"]);
    assert_eq!(percentage.out, "25.0\n");
    // The same daemon, found by environment variables; it was started by a process that has ended.
    assert_eq!(set.place.control(&["get_server_list"]).code, 0);
    assert!(set.place.log("control.log").contains("Starting control"));

    // mps-run finds it too and tells the program where it is, and nothing that is the daemon's.
    let mut run = set.command("mps-run");
    run.arg("--shim").arg(artifact("libmpsshim.so"));
    run.args(["sh", "-c"]).arg(
        "echo $MPSSHIM_PIPE_DIRECTORY $MPSSHIM_LOG $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $MPSSHIM_CONFIG",
    );
    let done = Done::from(run.output().expect("run"));
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let pipe = set.place.pipe().display();
    assert_eq!(done.out, format!("{pipe} {}\n", set.file.display()));
}

#[test]
fn the_environment_goes_before_the_file() {
    let set = Configured::new("active_thread_percentage = 25\nclient_priority = 1\n");
    let mut command = set.command("mps-control");
    command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50");
    assert!(command.arg("-d").status().expect("run").success());
    let percentage = set.control(&["get_default_active_thread_percentage"]);
    assert_eq!(percentage.out, "50.0\n");
    assert_eq!(set.control(&["get_default_client_priority"]).out, "1\n");
}

#[test]
fn what_is_wrong_is_said_with_file_line_and_key() {
    for (line, said) in [
        ("threads = 3", "unknown key threads; there are "),
        (
            "max_clients = 0",
            "max_clients = 0 must be a positive integer",
        ),
        (
            "max_spin_us = -1",
            "max_spin_us = -1 is not a number from 0 to 1000000",
        ),
        ("marks = 1", "marks = 1 is not one of auto, written, kernel"),
        (
            "turns = \"no\"",
            "turns = no is not one of auto, always, never",
        ),
        (
            "scheduling = \"lifo\"",
            "scheduling = lifo is not one of auto, fifo",
        ),
        (
            "users = \"all\"",
            "users = all is not one of serial, apart, together",
        ),
        (
            "cuda_library = \"libcuda.so.1\"",
            "cuda_library = libcuda.so.1 is not an absolute path",
        ),
        (
            "active_thread_percentage = 120",
            "active_thread_percentage = 120: ",
        ),
    ] {
        let set = Configured::new(line);
        let expected = format!("{}:3: {said}", set.file.display());
        for arguments in [["-d"], ["-f"], ["get_server_list"]] {
            let done = set.control(&arguments);
            assert_eq!((done.code, done.out.as_str()), (1, ""), "{line}");
            assert!(done.err.starts_with(&expected), "{}", done.err);
        }
        let run = set.command("mps-run").arg("true").output().expect("run");
        let run = Done::from(run);
        assert_eq!(run.code, 125);
        assert!(run.err.contains(&expected), "{}", run.err);
    }
    let mut none = Configured::new("");
    none.file = none.place.path().join("none.toml");
    let done = none.control(&["-d"]);
    assert_eq!(done.code, 1);
    assert!(
        done.err.starts_with("cannot read the configuration "),
        "{}",
        done.err
    );
}
