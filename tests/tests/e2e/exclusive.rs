//! Devices whose compute mode admits one process, or none (`nvidia-smi -c EXCLUSIVE_PROCESS`, `-c PROHIBITED`).

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::programs::{
    DriverFolder, Running, client, finish, preloaded, succeed, survivor, well,
};
use mpsshim_tests::scene::daemon_with;
use mpsshim_tests::survivors::{RPC_FAILURE, Survivor, clients, kill_server, server};
use std::process::Command;
use tempfile::TempDir;

const MODE: &str = "SOFTGPU_COMPUTE_MODE";
const UNAVAILABLE: &str = "CUDA_ERROR_DEVICE_UNAVAILABLE (46)";

/// A machine of its own, whose device admits one process, and a daemon there.
struct Machine {
    place: Place,
    mode: String,
    driver: DriverFolder,
    _folder: TempDir,
}

impl Machine {
    fn with(env: &[(&str, &str)]) -> Machine {
        let folder = tempfile::tempdir().expect("a folder");
        let mode = format!("EXCLUSIVE_PROCESS={}/device", folder.path().display());
        let place = daemon_with(&[&[(MODE, mode.as_str())], env].concat());
        Machine {
            place,
            mode,
            driver: DriverFolder::new(),
            _folder: folder,
        }
    }

    fn new() -> Machine {
        Machine::with(&[])
    }

    /// A survivor on the driver itself.
    fn native(&self) -> Command {
        let mut command = self.driver.native(env!("CARGO_BIN_EXE_survivor"));
        command.env(MODE, &self.mode);
        command
    }

    /// The driver admits no other process.
    #[track_caller]
    fn refuses_a_native_program(&self) {
        let refused = finish(&mut self.native());
        assert!(
            refused.out.contains(UNAVAILABLE),
            "{}{}",
            refused.out,
            refused.err
        );
    }

    fn restart(&self, options: &[&str]) -> Result<i32, String> {
        let old = server(&self.place).expect("a server").to_string();
        let done = self
            .place
            .control(&[&["restart_server", &old], options].concat());
        let text = done.out.trim().to_owned();
        match done.code {
            0 => Ok(text.parse().expect("a process id alone")),
            _ => Err(text),
        }
    }
}

#[test]
fn the_driver_admits_one_process_at_a_time() {
    let machine = Machine::new();
    let mut first = Running::start_until(&mut machine.native(), "started");
    machine.refuses_a_native_program();
    first.say("round");
    assert!(first.line().starts_with("ok 2 "));
    well(&first.finish(PATIENCE));
    let next = Running::start_until(&mut machine.native(), "started");
    well(&next.finish(PATIENCE));
}

#[test]
fn clients_share_the_server_and_outlive_it() {
    let machine = Machine::with(&[("MPSSHIM_STANDBY", "1")]);
    let place = &machine.place;
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(place)).collect();
    survivors.iter_mut().for_each(Survivor::round);
    machine.refuses_a_native_program();
    let before = clients(place);
    for _ in 0..2 {
        let old = server(place).expect("a server");
        let new = machine.restart(&[]).expect("a restart");
        assert_ne!(new, old);
        survivors.iter_mut().for_each(Survivor::round);
        kill_server(place);
        survivors.iter_mut().for_each(Survivor::round);
        wait_until("both are listed again", || clients(place) == before);
    }
    let log = place.log("control.log");
    assert!(
        log.contains("Device 0 is in EXCLUSIVE_PROCESS mode: server"),
        "{log}"
    );
    // A standby is started for a restart only.
    assert_eq!(log.matches("Starting standby").count(), 2, "{log}");
    assert!(
        place
            .log("server.log")
            .contains("Device 0 is in EXCLUSIVE_PROCESS mode")
    );
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn a_restart_is_refused_if_a_client_would_stay() {
    let machine = Machine::new();
    let place = &machine.place;
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(place));
    assert_eq!(bound.ask("graph"), "graph");
    let old = server(place).expect("a server");
    let why = machine.restart(&[]).expect_err("a client is bound");
    let expected = format!(
        "the clients of server {old} stay: client {} is bound by graphs; a device that is not in DEFAULT compute mode \
         admits one server, so no client can stay (-f ends it)",
        bound.program.pid()
    );
    assert_eq!(why, expected);
    assert_eq!(server(place), Some(old));
    idle.round();
    bound.round();
    let new = machine.restart(&["-f"]).expect("a restart by force");
    assert_ne!(new, old);
    assert_eq!(bound.ask("round"), RPC_FAILURE);
    idle.round();
    idle.end();
}

#[test]
fn a_quarantined_program_waits_until_the_usual_server_is_idle() {
    let machine = Machine::new();
    let place = &machine.place;
    let faulty = survivor(place, "faulty");
    let mut usual = Survivor::start(place);
    usual.round();
    let added = place.control(&["quarantine", "add", &faulty.display().to_string()]);
    assert_eq!((added.code, &*added.out), (0, ""), "{}", added.err);
    let mut waiting = Running::start(&mut preloaded(&faulty, place.pipe()));
    wait_until("it waits", || {
        place
            .log("control.log")
            .matches("Server is not ready")
            .count()
            == 2
    });
    let rows = place.ps_with_waiting();
    let row = rows.iter().find(|row| row["state"] == "waiting");
    let reason = &row.expect("a client that waits")["waits_for"];
    assert!(reason.contains("admits one server"), "{reason}");
    usual.round();
    assert!(!waiting.has_ended());
    usual.end();
    assert_eq!(waiting.line(), "started");
    let alone = server(place).expect("a server");
    // The next client of the usual server waits in turn.
    let mut command = client(place, &["work", "1"]);
    let next = Running::start(&mut command);
    wait_until("it waits too", || {
        place
            .log("control.log")
            .matches("Server is not ready")
            .count()
            == 3
    });
    waiting.say("round");
    assert!(waiting.line().starts_with("ok 2 "));
    assert_eq!(server(place), Some(alone));
    well(&waiting.finish(PATIENCE));
    assert_eq!(well(&next.finish(PATIENCE)), "busy\n");
}

#[test]
fn a_client_in_direct_mode_has_the_device_alone_or_is_refused() {
    let machine = Machine::new();
    let place = &machine.place;
    let mut usual = Survivor::start(place);
    let direct = || {
        let mut command = preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe());
        command
            .env("MPSSHIM_MODE", "direct")
            .env(MODE, &machine.mode);
        command
    };
    let refused = finish(&mut direct());
    assert!(
        refused.out.contains(UNAVAILABLE),
        "{}{}",
        refused.out,
        refused.err
    );
    let why =
        "device 0 is in EXCLUSIVE_PROCESS mode, in which a client in direct mode cannot share it";
    // The client may have ended before the daemon has written the line.
    wait_until("the log has the reason", || {
        place.log("control.log").contains(why)
    });
    usual.round();
    usual.end();

    let machine = Machine::with(&[("MPSSHIM_MODE", "direct")]);
    let place = &machine.place;
    let direct = || {
        let mut command = preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe());
        command.env(MODE, &machine.mode);
        command
    };
    let mut alone = Running::start_until(&mut direct(), "started");
    alone.say("round");
    assert!(alone.line().starts_with("ok 2 "));
    let second = finish(&mut direct());
    assert!(
        second.out.contains(UNAVAILABLE),
        "{}{}",
        second.out,
        second.err
    );
    let proxied = finish(client(place, &["work", "1"]).env("MPSSHIM_MODE", "proxy"));
    assert!(
        proxied.out.contains(UNAVAILABLE),
        "{}{}",
        proxied.out,
        proxied.err
    );
    well(&alone.finish(PATIENCE));
    // The device is free for the server again.
    let proxied = succeed(client(place, &["work", "1"]).env("MPSSHIM_MODE", "proxy"));
    assert_eq!(proxied, "busy\n");
}

#[test]
fn a_server_that_may_not_use_the_device_says_why() {
    let machine = Machine::new();
    let place = &machine.place;
    let native = Running::start_until(&mut machine.native(), "started");
    let started = Running::start(&mut client(place, &["work", "1"]));
    wait_until("the server has given up once", || {
        place.log("server.log").contains(
            "is in EXCLUSIVE_PROCESS mode, and another process uses it, which nvidia-smi shows; end that process",
        )
    });
    well(&native.finish(PATIENCE));
    // The next server finds it free.
    assert_eq!(well(&started.finish(PATIENCE)), "busy\n");

    // Each server waits for the device, and the third is the last.
    let machine = Machine::new();
    let native = Running::start_until(&mut machine.native(), "started");
    let refused = finish(&mut client(&machine.place, &["work", "1"]));
    assert_ne!(refused.code, 0);
    let log = machine.place.log("control.log");
    assert_eq!(log.matches("Starting new server").count(), 3, "{log}");
    well(&native.finish(PATIENCE));

    let place = daemon_with(&[(MODE, "PROHIBITED")]);
    let refused = finish(&mut client(&place, &["work", "1"]));
    assert_ne!(refused.code, 0);
    let log = place.log("server.log");
    let why = "is in PROHIBITED mode, in which no process can use it; an administrator can change that with nvidia-smi";
    assert!(log.contains(why), "{log}");
}

#[test]
fn commands_show_the_mode() {
    let machine = Machine::new();
    let place = &machine.place;
    let survivor = Survivor::start(place);
    let table = place.control(&["device_query"]).out;
    assert_eq!(table.matches(" EXCLUSIVE_PROCESS\n").count(), 2, "{table}");
    assert_eq!(place.ps()[0]["compute_mode"], "EXCLUSIVE_PROCESS");
    survivor.end();
}
