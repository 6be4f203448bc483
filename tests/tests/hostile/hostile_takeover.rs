//! Processes that say they are a server whose daemon has died, and what they report then: only what the kernel vouches for is
//! believed.

use mpsshim_control::link::ToDaemon;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::Limits;
use mpsshim_model::named::Named;
use mpsshim_tests::control_daemon::{Client, Place, as_user, two_users, wait_until};
use mpsshim_tests::programs::Running;
use std::os::unix::process::CommandExt;

const TAKEN: &str = "\"TakenOver\"";

/// An impostor of this user that reports these limits, and the daemon's answer to it.
fn introduced(place: &Place, user: u32, limits: &Limits) -> (Running, String) {
    let program = env!("CARGO_BIN_EXE_fake-server");
    let mut command = place.command_like(&place.command("mps-control"), program);
    let limits = serde_json::to_string(limits).expect("JSON");
    command.arg("introduce").arg(limits).uid(user).gid(user);
    let mut running = Running::start(&mut command);
    let answer = running.line();
    (running, answer)
}

fn limits_of(users: impl IntoIterator<Item = u32>, device: usize) -> Limits {
    let limit = |uid| (uid, [(device, 4096)].into());
    Limits {
        user_memory: users.into_iter().map(limit).collect(),
        ..Limits::default()
    }
}

fn limit_of(place: &Place, user: u32) -> String {
    let command = ["get_user_device_pinned_mem_limit", &user.to_string(), "0"];
    let done = place.control(&command);
    assert_eq!(done.code, 0, "{}", done.err);
    done.out.trim().to_owned()
}

fn report(impostor: &mut Running, report: &ToDaemon) {
    impostor.say(&serde_json::to_string(report).expect("JSON"));
}

fn ready(device: &str) -> ToDaemon {
    let device = DeviceInfo {
        name: device.into(),
        uuid: "GPU-aaaaaaaa-0000-0000-0000-000000000000".into(),
        pci: "0000:00:07.0".into(),
        memory: 1 << 20,
        compute_mode: Default::default(),
        chunks: Default::default(),
    };
    ToDaemon::Ready {
        devices: vec![device],
    }
}

#[test]
fn nobody_sets_limits_of_other_users() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let none = limit_of(&place, two);
    for (limits, why) in [
        (limits_of([one, two], 0), format!("a limit of user {two}")),
        (limits_of([two], 0), format!("a limit of user {two}")),
        (limits_of(0..1000, 0), "a limit of user 0".to_owned()),
        (limits_of([one], 1), "a limit for device 1, of 1".to_owned()),
    ] {
        let (impostor, answer) = introduced(&place, one, &limits);
        let refused = format!("{{\"Refused\":{{\"reason\":\"it reports {why}\"}}}}");
        assert_eq!(answer, refused);
        let line = format!(
            "Server {} of user {one} not taken over: it reports {why}",
            impostor.pid()
        );
        assert!(place.log("control.log").contains(&line), "{line}");
    }
    assert_eq!(limit_of(&place, two), none);
    // The operator still finds room for limits.
    let set = ["set_user_device_pinned_mem_limit", "4000000000", "0", "1G"];
    assert_eq!(place.control(&set).code, 0);
    // What a real server of that user knows is adopted.
    let (_server, answer) = introduced(&place, one, &limits_of([one], 0));
    assert_eq!(answer, TAKEN);
    assert_ne!(limit_of(&place, one), none);
}

#[test]
fn a_server_of_root_brings_everyone_s_limits() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let none = limit_of(&place, one);
    let (_server, answer) = introduced(&place, 0, &limits_of([one, two], 0));
    assert_eq!(answer, TAKEN);
    assert!(
        [one, two]
            .iter()
            .all(|user| limit_of(&place, *user) != none)
    );
}

#[test]
fn a_server_of_a_user_is_told_that_user_s_limits_only() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    for user in [one, two] {
        let command = format!("set_user_device_pinned_mem_limit {user} 0 1G");
        assert_eq!(
            place.control(&command.split(' ').collect::<Vec<_>>()).code,
            0
        );
    }
    let client = as_user(one, || Client::connect(&place));
    let pid = client.welcome().expect("welcome").server_pid;
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("command line");
    let limits = line
        .split('\0')
        .skip_while(|part| *part != "--limits")
        .nth(1);
    let limits: Limits = serde_json::from_str(limits.expect("limits")).expect("JSON");
    assert_eq!(limits.user_memory.keys().collect::<Vec<_>>(), [&one]);
}

/// The limits of a server with this name and a table of partitions, as JSON.
fn parted(name: Option<&str>, devices: &str, names: &str) -> Limits {
    let json = format!(r#"{{"devices":{devices},"names":{names}}}"#);
    let named = |name: &str| {
        Box::new(Named {
            name: name.to_owned(),
            ..Named::default()
        })
    };
    Limits {
        partitions: Some(serde_json::from_str(&json).expect("partitions")),
        named: name.map(named),
        ..Limits::default()
    }
}

#[test]
fn no_server_brings_partitions_of_another_one() {
    if two_users().is_none() {
        return;
    }
    let place = Place::with_daemon();
    let of_a = parted(Some("a"), r#"{"GPU-x":{"1":[0]}}"#, r#"{"p":["GPU-x",1]}"#);
    let (a, answer) = introduced(&place, 0, &of_a);
    assert_eq!(answer, TAKEN);
    let another = "it reports partitions that another server has";
    let other = "it reports other partitions than this daemon has";
    let refused = |limits: &Limits, why: &str| {
        let (_impostor, answer) = introduced(&place, 0, limits);
        let expected = format!("{{\"Refused\":{{\"reason\":\"{why}\"}}}}");
        assert_eq!(answer, expected, "{limits:?}");
    };
    let same_id = r#"{"GPU-x":{"1":[3]}}"#;
    let same_name = (r#"{"GPU-x":{"2":[1]}}"#, r#"{"p":["GPU-x",2]}"#);
    for name in [Some("b"), None] {
        refused(&parted(name, same_id, "{}"), another);
        refused(&parted(name, same_name.0, same_name.1), another);
    }
    // Its table is not that of users' servers, and stays with its name while it has no process.
    a.kill();
    wait_until("the daemon has seen its end", || {
        place.control(&["get_server_list"]).out.is_empty()
    });
    refused(&parted(Some("a"), same_id, "{}"), other);
    refused(&parted(Some("a"), "{}", "{}"), other);
    refused(&parted(None, same_id, "{}"), another);
    let (_a, answer) = introduced(&place, 0, &of_a);
    assert_eq!(answer, TAKEN);
    let of_users = parted(None, r#"{"GPU-x":{"2":[0]},"GPU-y":{"1":[0]}}"#, "{}");
    let (_users, answer) = introduced(&place, 0, &of_users);
    assert_eq!(answer, TAKEN);
    refused(&parted(Some("b"), r#"{"GPU-y":{"1":[7]}}"#, "{}"), another);
}

#[test]
fn the_devices_are_not_learnt_from_a_stranger() {
    let Some([one, _]) = two_users() else {
        return;
    };
    // The daemon's own search for them fails.
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "crash")]);
    let (mut impostor, answer) = introduced(&place, one, &Limits::default());
    assert_eq!(answer, TAKEN);
    report(&mut impostor, &ready("NVIDIA Nothing"));
    wait_until("it is ready", || {
        place.log("control.log").contains(": Ready")
    });
    let done = place.control(&["get_default_device_pinned_mem_limit", "0"]);
    let said = format!("{}{}", done.out, done.err);
    assert!(
        done.code == 1 && said.contains("cannot list the devices"),
        "{said}"
    );
}

#[test]
fn reports_that_no_server_makes_end_it() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let stranger = ToDaemon::Connected {
        session: 1,
        pid: 1,
        uid: two,
        partition: None,
        namespace: None,
    };
    let on_terminals = ready("\x1b[2Jx");
    for (said, why) in [
        (&stranger, format!("it reports a client of user {two}")),
        (
            &on_terminals,
            "it reports a device with an invalid name".to_owned(),
        ),
    ] {
        let (mut impostor, answer) = introduced(&place, one, &Limits::default());
        assert_eq!(answer, TAKEN);
        report(&mut impostor, said);
        wait_until("it is ended", || impostor.has_ended());
        let line = format!("Server {}: {why}", impostor.pid());
        assert!(place.log("control.log").contains(&line), "{line}");
        wait_until("the daemon has seen that", || {
            place.control(&["get_server_list"]).out.is_empty()
        });
    }
}
