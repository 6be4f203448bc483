//! Clients of several releases at one daemon, and upgrades while they run.

use crate::restart::{Installed, restart};
use crate::take_over::next_daemon;
use mpsshim_proto::handshake::Wire;
use mpsshim_proto::wire;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Client, OTHER_WIRE, Place, refused_status, wait_until};
use mpsshim_tests::survivors::{Survivor, wait_until_portable};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MPS_CONNECTION_FAILED: u32 = 805;

/// The library of an earlier release, which programs that run and containers still have.
pub fn library(of: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("libmpsshim.so");
    let packed = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("fixtures/releases/libmpsshim-{of}.so.zst"));
    let packed = File::open(packed).expect("the library");
    let mut unpacked = ruzstd::decoding::StreamingDecoder::new(packed).expect("zstd");
    let mut file = File::create(&path).expect("a file");
    io::copy(&mut unpacked, &mut file).expect("unpacked");
    (folder, path)
}

fn servers(place: &Place) -> Vec<i32> {
    let list = place.control(&["get_server_list"]).out;
    list.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The file name of a process's executable.
fn executable(pid: i32) -> String {
    let path = fs::read_link(format!("/proc/{pid}/exe")).expect("a process");
    let name = path.file_name().expect("a name").to_string_lossy();
    name.into_owned()
}

/// Programs with the library of release 0.1.0 go on while the server is replaced, and are served beside others.
#[test]
fn programs_of_the_previous_release_are_served_and_outlive_an_upgrade() {
    let (_folder, library) = library("0.1.0");
    let library = library.to_str().expect("UTF-8");
    let installed = Installed::new();
    let place = installed.daemon(&[]);
    let mut old = Survivor::start_in(place.pipe(), &[("LD_PRELOAD", library)]);
    let mut new = Survivor::start(&place);
    assert_eq!(servers(&place).len(), 1);
    let [first] = servers(&place)[..] else {
        panic!("one server")
    };
    let second = restart(&place, &[]).expect("a restart");
    assert_ne!(first, second);
    for one in [&mut old, &mut new] {
        one.round();
    }
    // The server has noted that the last round is complete.
    wait_until_portable(&place, 2);
    kill(Pid::from_raw(second), Signal::SIGKILL).expect("killed");
    for one in [&mut old, &mut new] {
        one.round();
    }
    old.end();
    new.end();
}

#[test]
fn a_client_of_another_release_gets_a_server_that_the_package_has_left() {
    let installed = Installed::new();
    installed.leave_earlier("9.9.9", &artifact("fake-server"));
    let place = installed.daemon(&[]);
    let mut program = Survivor::start(&place);
    let usual = servers(&place);
    let other = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(other.welcome().map(|welcome| welcome.status), Some(0));
    let both = servers(&place);
    assert!(both.len() == 2 && both.contains(&usual[0]), "{both:?}");
    program.round();
    // No server of its release is left when it has gone.
    drop(other);
    wait_until("its server has ended", || servers(&place) == usual);
    // And the next one gets another.
    let next = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(next.welcome().map(|welcome| welcome.status), Some(0));
    program.round();
    program.end();
}

#[test]
fn a_server_that_an_upgrade_has_replaced_is_started_for_clients_of_its_release() {
    let installed = Installed::of(&artifact("fake-server"));
    let place = installed.daemon(&[]);
    let first = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(first.welcome().map(|welcome| welcome.status), Some(0));
    let [old] = servers(&place)[..] else {
        panic!("one server")
    };
    installed.replace_with(&artifact("mps-server"));
    kill(Pid::from_raw(old), Signal::SIGKILL).expect("killed");
    wait_until("it has ended", || servers(&place).is_empty());
    let second = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(second.welcome().map(|welcome| welcome.status), Some(0));
    let [again] = servers(&place)[..] else {
        panic!("one server")
    };
    assert_eq!(executable(again), "mps-server (deleted)");
}

#[test]
fn a_client_whose_release_no_server_speaks_is_refused_with_the_reason() {
    let installed = Installed::new();
    let place = installed.daemon(&[]);
    let unknown = Wire {
        protocol: wire::OWN.protocol + 1,
        ..wire::OWN
    };
    let hello = mpsshim_tests::control_daemon::hello_in(unknown);
    assert_eq!(refused_status(&place, &hello), Some(MPS_CONNECTION_FAILED));
    let log = place.log("control.log");
    let said = format!(
        "its libmpsshim.so is of another release ({unknown}), and no server of that release is installed"
    );
    assert!(log.contains(&said), "{log}");
}

#[test]
fn a_server_of_another_release_is_taken_over_by_the_next_daemon() {
    let installed = Installed::of(&artifact("fake-server"));
    let place = installed.daemon(&[]);
    let other = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(other.welcome().map(|welcome| welcome.status), Some(0));
    installed.replace_with(&artifact("mps-server"));
    let old = servers(&place)[0];
    next_daemon(&place, &["-d"]);
    wait_until("it is taken over", || servers(&place) == [old]);
    // It has its clients, and gets others of its release only.
    assert!(other.is_connected());
    let next = Client::with_wire(&place, OTHER_WIRE);
    assert_eq!(next.welcome().map(|welcome| welcome.status), Some(0));
    assert_eq!(servers(&place), [old]);
}
