//! The commands for devices, limits, priorities and weights: what they print, and what reaches the servers.

use mpsshim_tests::control_daemon::{Client, Done, Place, as_user, other_user, wait_until};
use mpsshim_tests::scene::daemon_with;
use nix::sys::signal::Signal;

const UUID: &str = "GPU-00000000-0000-0000-0000-000000000000";

fn outcome(done: &Done) -> (i32, &str) {
    (done.code, &done.out)
}

/// The fake server and a client of it.
fn serve(place: &Place) -> (Client, String) {
    let client = Client::connect(place);
    let server = client.welcome().expect("welcome").server_pid.to_string();
    (client, server)
}

/// What the last lines of server.log say that begin so.
fn last_said(place: &Place, beginning: &str) -> String {
    let log = place.log_after_stamp("server.log");
    let said = log.iter().filter_map(|line| line.split_once("] "));
    let mut said = said.filter(|(_, text)| text.starts_with(beginning));
    said.next_back().expect(beginning).1.to_owned()
}

#[test]
fn default_percentages_hold_for_servers_started_later() {
    let place = Place::with_daemon();
    let get = || place.control(&["get_default_active_thread_percentage"]).out;
    assert_eq!(get(), "100.0\n");
    let (client, first) = serve(&place);
    let set = place.control(&["set_default_active_thread_percentage", "50"]);
    assert_eq!((outcome(&set), set.err.as_str()), ((0, "50.0\n"), ""));
    assert_eq!(get(), "50.0\n");
    for (value, printed) in [("33.3333", "33.3\n"), ("1e1", "10.0\n"), ("50%", "50.0\n")] {
        let set = place.control(&["set_default_active_thread_percentage", value]);
        assert_eq!(outcome(&set), (0, printed));
    }
    for value in ["abc", "0", "-5", "100.5", "50%%", "nan", ""] {
        let set = place.control(&["set_default_active_thread_percentage", value]);
        assert_eq!(outcome(&set), (1, "50.0\n"), "{value}");
        let expected = format!(
            "\"{value}\": a percentage is a number above 0 and at most 100; nothing is changed\n"
        );
        assert_eq!(set.err, expected);
    }
    // The running server has what it was started with, the next one the new default.
    let of = |pid: &str| place.control(&["get_active_thread_percentage", pid]).out;
    assert_eq!(of(&first), "100.0\n");
    place.control(&["shutdown_server", &first, "-f"]);
    drop(client);
    let (_client, second) = serve(&place);
    assert_eq!(of(&second), "50.0\n");
    assert_eq!(
        last_said(&place, "Active Threads"),
        "Active Threads Percentage set to 50.0"
    );
}

#[test]
fn a_running_server_s_percentage() {
    let place = Place::with_daemon();
    let (_client, server) = serve(&place);
    let set = place.control(&["set_active_thread_percentage", &server, "33.3"]);
    assert_eq!(outcome(&set), (0, "33.3\n"));
    wait_until("the server knows", || {
        last_said(&place, "Active Threads") == "Active Threads Percentage set to 33.3"
    });
    let all = place.control(&["get_active_thread_percentage_all"]);
    assert_eq!(outcome(&all), (0, format!("{server} 33.3\n").as_str()));
    let all = place.control(&["set_active_thread_percentage_all", "20"]);
    assert_eq!(outcome(&all), (0, format!("{server} 20.0\n").as_str()));
    let set = place.control(&["set_active_thread_percentage", &server, "many"]);
    assert_eq!(outcome(&set), (1, "20.0\n"));
    let of = |pid: &str| place.control(&["get_active_thread_percentage", pid]);
    assert_eq!(outcome(&of(&server)), (0, "20.0\n"));
    assert_eq!(outcome(&of("99999")), (1, "Server 99999 not found\n"));
    let default = place.control(&["get_default_active_thread_percentage"]).out;
    assert_eq!(default, "100.0\n");
}

#[test]
fn memory_limits_by_ordinal_and_uuid() {
    let place = Place::with_daemon();
    // No server has said what there is: the daemon finds out.
    let get = |device: &str| {
        let done = place.control(&["get_default_device_pinned_mem_limit", device]);
        (done.code, done.out)
    };
    let set = |device: &str, amount: &str| {
        let name = "set_default_device_pinned_mem_limit";
        let done = place.control(&[name, device, amount]);
        (done.code, done.out)
    };
    assert_eq!(get("0"), (0, String::new()));
    assert_eq!(set("0", "3G"), (0, String::new()));
    for device in ["0", UUID, "GPU-0000"] {
        assert_eq!(get(device), (0, "3G\n".into()));
    }
    let (_client, server) = serve(&place);
    assert_eq!(
        last_said(&place, "Device pinned"),
        "Device pinned memory limit for device 0 set to 0xc0000000 bytes"
    );
    let of = |pid: &str, device: &str| {
        let done = place.control(&["get_device_pinned_mem_limit", pid, device]);
        (done.code, done.out)
    };
    assert_eq!(of(&server, "0"), (0, "3G\n".into()));
    let done = place.control(&["set_device_pinned_mem_limit", &server, UUID, "512M"]);
    assert_eq!(outcome(&done), (0, ""));
    assert_eq!(of(&server, "0"), (0, "512M\n".into()));
    wait_until("the server knows", || {
        last_said(&place, "Device pinned").ends_with("set to 0x20000000 bytes")
    });
    assert_eq!(set("0", "none"), (0, String::new()));
    assert_eq!(get("0"), (0, String::new()));
    for (device, amount, error) in [
        (
            "7",
            "1G",
            "Device 7 not found; device_query lists the devices\n",
        ),
        (
            "GPU-1",
            "1G",
            "Device GPU-1 not found; device_query lists the devices\n",
        ),
        ("0", "lots", "\"lots\" is not an amount of memory"),
        ("0", "0G", "\"0G\" is not an amount of memory"),
        ("0", "-1G", "\"-1G\" is not an amount of memory"),
    ] {
        let (code, out) = set(device, amount);
        assert_eq!(code, 1, "{device} {amount}");
        assert!(out.contains(error), "{out}");
    }
    assert_eq!(of("99999", "0").1, "Server 99999 not found\n");
}

#[test]
fn memory_guarantees_by_ordinal_and_uuid() {
    let place = Place::with_daemon();
    let run = |words: &[&str]| {
        let done = place.control(words);
        (done.code, done.out)
    };
    let nothing = || (0, String::new());
    let set = ["set_default_device_mem_guarantee", "0", "3G"];
    assert_eq!(run(&set), nothing());
    for device in ["0", UUID, "GPU-0000"] {
        let get = ["get_default_device_mem_guarantee", device];
        assert_eq!(run(&get), (0, "3G\n".into()));
    }
    let limit = ["get_default_device_pinned_mem_limit", "0"];
    assert_eq!(run(&limit), nothing());
    let set = ["set_user_device_mem_guarantee", "1000", UUID, "1G"];
    assert_eq!(run(&set), nothing());
    let (_client, server) = serve(&place);
    for of in [
        "for device 0 set to 0xc0000000",
        "of user 1000 for device 0 set to 0x40000000",
    ] {
        let line = format!("Device memory guarantee {of} bytes");
        assert!(place.log("server.log").contains(&line), "{line}");
    }
    let get = ["get_device_mem_guarantee", &server, "0"];
    assert_eq!(run(&get), (0, "3G\n".into()));
    let set = ["set_device_mem_guarantee", &server, UUID, "512M"];
    assert_eq!((run(&set), run(&get)), (nothing(), (0, "512M\n".into())));
    wait_until("the server knows", || {
        let line = "Device memory guarantee for device 0 set to 0x20000000 bytes";
        place.log("server.log").contains(line)
    });
    let get = ["get_user_device_mem_guarantee", "1000", "0"];
    assert_eq!(run(&get), (0, "1G\n".into()));
    let json = run(&[&["--format", "json"], &get[..]].concat()).1;
    assert!(json.contains("\"memory_guarantee\":1073741824"), "{json}");
    let set = ["set_user_device_mem_guarantee", "1000", "0", "none"];
    assert_eq!((run(&set), run(&get)), (nothing(), nothing()));
    for (device, amount, error) in [
        ("7", "1G", "Device 7 not found"),
        ("0", "999T", "Device 0 has only"),
        ("0", "lots", "\"lots\" is not an amount of memory"),
    ] {
        let (code, out) = run(&["set_user_device_mem_guarantee", "1", device, amount]);
        assert!(code == 1 && out.contains(error), "{out}");
    }
}

#[test]
fn memory_limits_of_a_user() {
    let place = Place::with_daemon();
    let get = |user: &str, device: &str| {
        let done = place.control(&["get_user_device_pinned_mem_limit", user, device]);
        (done.code, done.out)
    };
    let set = |user: &str, device: &str, amount: &str| {
        let name = "set_user_device_pinned_mem_limit";
        let done = place.control(&[name, user, device, amount]);
        (done.code, done.out)
    };
    assert_eq!(get("1000", "0"), (0, String::new()));
    assert_eq!(set("1000", "GPU-0000", "3G"), (0, String::new()));
    assert_eq!(set("1001", UUID, "4096"), (0, String::new()));
    assert_eq!(get("1000", "0"), (0, "3G\n".into()));
    let (_client, _server) = serve(&place);
    assert_eq!(
        last_said(&place, "Device pinned"),
        "Device pinned memory limit of user 1001 for device 0 set to 0x100000000 bytes"
    );
    // A running server is told at once.
    assert_eq!(set("1001", "0", "none"), (0, String::new()));
    assert_eq!(set("1000", "0", "512M"), (0, String::new()));
    wait_until("the server knows", || {
        last_said(&place, "Device pinned")
            .ends_with("of user 1000 for device 0 set to 0x20000000 bytes")
    });
    assert_eq!(get("1001", "0"), (0, String::new()));
    let json = place.control(&[
        "--format",
        "json",
        "get_user_device_pinned_mem_limit",
        "1000",
        "0",
    ]);
    assert!(json.out.contains("\"memory_limit\":536870912") && json.out.contains("\"uid\":1000"));
    for (user, device, amount, error) in [
        ("root", "0", "1G", "\"root\" is not a user id"),
        ("-1", "0", "1G", "\"-1\" is not a user id"),
        ("4294967295", "0", "1G", "\"4294967295\" is not a user id"),
        ("1000", "7", "1G", "Device 7 not found"),
        ("1000", "0", "50%", "\"50%\" is not an amount of memory"),
        ("1000", "0", "lots", "\"lots\" is not an amount of memory"),
        ("1000", "0", "0", "\"0\" is not an amount of memory"),
        ("1000", "0", "4097M", "Device 0 has only 4G\n"),
        (
            "1000",
            "GPU-0",
            "17179869183G",
            "Device GPU-0 has only 4G\n",
        ),
    ] {
        let (code, out) = set(user, device, amount);
        assert_eq!(code, 1, "{user} {device} {amount}");
        assert!(out.contains(error), "{out}");
    }
    assert_eq!(
        get("1000", "0"),
        (0, "512M\n".into()),
        "nothing was changed"
    );
    for user in ["root", ""] {
        assert_eq!(get(user, "0").0, 1);
    }
}

#[test]
fn scheduling_of_all_and_of_a_user() {
    let place = daemon_with(&[("MPSSHIM_SCHEDULING", "fifo")]);
    let get = |arguments: &[&str]| {
        let done = place.control(&[&["get_scheduling"], arguments].concat());
        (done.code, done.out)
    };
    let set = |arguments: &[&str]| {
        let done = place.control(&[&["set_scheduling"], arguments].concat());
        assert_eq!(outcome(&done), (0, ""), "{arguments:?}");
    };
    let says = |text: &str| (0, format!("{text}\n"));
    assert_eq!(get(&[]), says("fifo"));
    set(&["auto", "1000"]);
    assert_eq!(get(&[]), says("fifo\n1000 auto"));
    assert_eq!(
        (get(&["1000"]), get(&["1001"])),
        (says("auto"), says("fifo"))
    );
    let json = place.control(&["--format", "json", "get_scheduling"]).out;
    let daemon_s = r#"{"scheduling":"fifo","uid":null,"user":null}"#;
    assert!(json.contains(daemon_s), "{json}");
    assert!(json.contains(r#""uid":1000"#), "{json}");
    let (_client, first) = serve(&place);
    let told = |text: &str| {
        wait_until("the server knows", || {
            last_said(&place, "Scheduling") == text
        });
    };
    told("Scheduling of user 1000 set to auto");
    // A running server is told at once.
    set(&["fifo", "1001"]);
    told("Scheduling of user 1001 set to fifo");
    set(&["none", "1000"]);
    set(&["none", "1001"]);
    told("Scheduling set to fifo");
    assert_eq!(get(&[]), says("fifo"));
    set(&["auto"]);
    told("Scheduling set to auto");
    // And so is the next one.
    set(&["fifo"]);
    set(&["auto", "7"]);
    place.control(&["shutdown_server", &first, "-f"]);
    let (_client, second) = serve(&place);
    assert_ne!(first, second);
    told("Scheduling of user 7 set to auto");
    for (arguments, error) in [
        (&["lifo"][..], "\"lifo\" is not one of auto, fifo, none"),
        (&["fifo", "root"], "\"root\" is not a user id"),
        (&["none"], "none needs a user id"),
        (&[], "auto, fifo or none, and perhaps a user id, expected"),
    ] {
        let done = place.control(&[&["set_scheduling"], arguments].concat());
        assert_eq!(done.code, 1, "{arguments:?}");
        assert!(done.out.contains(error), "{}", done.out);
    }
    assert_eq!(get(&[]), says("fifo\n7 auto"));
}

#[test]
fn the_next_daemon_takes_over_the_scheduling_of_users() {
    let place = Place::with_daemon();
    let user = place.uid().to_string();
    let get = || place.control(&["get_scheduling"]).out;
    let done = place.control(&["set_scheduling", "fifo", &user]);
    assert_eq!(outcome(&done), (0, ""));
    let (_client, _server) = serve(&place);
    place.signal_daemon(Signal::SIGKILL);
    wait_until("another daemon listens", || {
        place.control(&["-d"]).code == 0
    });
    let taken = format!("auto\n{user} fifo\n");
    wait_until("it has taken the server over", || get() == taken);
}

/// Kills the daemon and starts the next one, which has `MPSSHIM_SCHEDULING` in its environment; then waits until
/// `get_scheduling` prints that, for servers that are taken over too.
fn next_daemon_schedules(place: &mut Place, setting: &str, printed: &str) {
    let before = place
        .log("control.log")
        .matches(" taken over with ")
        .count();
    place.signal_daemon(Signal::SIGKILL);
    place.set_env("MPSSHIM_SCHEDULING", setting);
    wait_until("another daemon listens", || {
        place.control(&["-d"]).code == 0
    });
    wait_until("it has taken the server over", || {
        place
            .log("control.log")
            .matches(" taken over with ")
            .count()
            > before
    });
    assert_eq!(place.control(&["get_scheduling"]).out, printed, "{setting}");
}

#[test]
fn the_next_daemon_keeps_the_scheduling_of_running_servers_unless_it_is_set() {
    let mut place = Place::with_daemon_env(&[("MPSSHIM_SCHEDULING", "fifo")]);
    let (_client, _server) = serve(&place);
    // An empty variable counts as not set.
    next_daemon_schedules(&mut place, "", "fifo\n");
    assert_eq!(last_said(&place, "Scheduling"), "Scheduling set to fifo");
    next_daemon_schedules(&mut place, "auto", "auto\n");
    wait_until("the server knows", || {
        last_said(&place, "Scheduling") == "Scheduling set to auto"
    });
    // The same holds for a scheduling set by a command.
    let done = place.control(&["set_scheduling", "fifo"]);
    assert_eq!(outcome(&done), (0, ""));
    next_daemon_schedules(&mut place, "", "fifo\n");
    assert_eq!(last_said(&place, "Scheduling"), "Scheduling set to fifo");
}

#[test]
fn the_server_of_another_user_sets_the_scheduling_of_its_user_only() {
    let Some(user) = other_user() else { return };
    let mut place = Place::with_daemon_env(&[("MPSSHIM_SCHEDULING", "fifo")]);
    let client = as_user(user, || Client::connect(&place));
    client.welcome().expect("welcome");
    next_daemon_schedules(&mut place, "", &format!("auto\n{user} fifo\n"));
    next_daemon_schedules(&mut place, "fifo", &format!("fifo\n{user} fifo\n"));
}

#[test]
fn priorities_and_weights() {
    let place = Place::with_daemon();
    let get = || place.control(&["get_default_client_priority"]).out;
    assert_eq!(get(), "0\n");
    let set = |value: &str| place.control(&["set_default_client_priority", value]);
    assert_eq!(outcome(&set("1")), (0, ""));
    let refusal = "Invalid priority value - must be 0 or 1!\n";
    assert_eq!(outcome(&set("2")), (1, refusal));
    assert_eq!(get(), "1\n");
    let (_client, server) = serve(&place);
    assert_eq!(
        last_said(&place, "Server Priority"),
        "Server Priority set to 1"
    );

    let me = std::process::id().to_string();
    let weight = || {
        let done = place.control(&["get_client_weight", &server, &me]);
        (done.code, done.out)
    };
    wait_until("the client is known", || weight().0 == 0);
    assert_eq!(weight(), (0, "100\n".into()));
    let set = |weight: &str| place.control(&["set_client_weight", &server, &me, weight]);
    assert_eq!(outcome(&set("300")), (0, ""));
    assert_eq!(weight(), (0, "300\n".into()));
    for wrong in ["0", "10001", "heavy"] {
        assert!(set(wrong).out.contains("a weight is 1 to 10000"));
    }
    let stranger = place.control(&["set_client_weight", &server, "99999", "5"]);
    let missing = format!("Client 99999 of server {server} not found\n");
    assert_eq!(outcome(&stranger), (1, missing.as_str()));
}

#[test]
fn the_daemon_s_environment_is_the_first_default() {
    let env = [
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "GPU-0000=1G"),
        ("CUDA_MPS_CLIENT_PRIORITY", "7"),
    ];
    let (place, said) = Place::with_warned_daemon(&["-d"], &env);
    assert!(said.contains("CUDA_MPS_CLIENT_PRIORITY=7 "), "{said}");
    let warning = "CUDA_MPS_CLIENT_PRIORITY=7 is ignored: it must be 0 or 1";
    assert!(place.log("control.log").contains(warning));
    assert_eq!(
        place.control(&["get_default_active_thread_percentage"]).out,
        "40.0\n"
    );
    let (_client, server) = serve(&place);
    // The limit of a device that is named by its UUID came before the first client.
    let log = place.log("server.log");
    let limit = log.find("memory limit for device 0 set to 0x40000000 bytes");
    assert!(limit < log.find("Received new client request"), "{log}");
    assert!(limit.is_some());
    let environment = std::fs::read(format!("/proc/{server}/environ")).expect("environment");
    let environment = String::from_utf8_lossy(&environment);
    assert!(!environment.contains("CUDA_MPS_"), "{environment}");
    assert_eq!(
        place
            .control(&["get_device_pinned_mem_limit", &server, "0"])
            .out,
        "1G\n"
    );
}

#[test]
fn a_daemon_with_a_limit_for_no_device_does_not_start() {
    for (name, limits, device) in [
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G,3=2G", "3"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "GPU-9=1G", "GPU-9"),
        ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=1G,3=2G", "3"),
    ] {
        let mut place = Place::new();
        place.set_env(name, limits);
        let done = place.control(&["-d"]);
        assert_eq!((done.code, done.out.as_str()), (1, ""));
        let why = format!("{name}: Device {device} not found");
        assert!(done.err.contains(&why), "{}", done.err);
    }
}

#[test]
fn devices_are_listed_with_and_without_a_server() {
    let place = daemon_with(&[("SOFTGPU_DEVICES", "2")]);
    let before = place.control(&["device_query"]);
    let lines: Vec<&str> = before.out.lines().collect();
    assert_eq!((before.code, lines[0], lines.len()), (0, "Default", 4));
    assert_eq!(
        lines[1],
        "Device Ordinal  PCI IDs        UUID                                      Name                              Attributes"
    );
    for (ordinal, row) in lines[2..].iter().enumerate() {
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[0], ordinal.to_string());
        assert!(
            words[1].ends_with(".00") && words[2].starts_with("GPU-"),
            "{row}"
        );
        assert_eq!(words.last(), Some(&"N/A"));
    }
    assert_eq!(
        place.control(&["get_server_list"]).out,
        "",
        "no server was started"
    );

    let uid = place.uid().to_string();
    place.control(&["start_server", "-uid", &uid]);
    let server = place.control(&["get_server_list"]).out.trim().to_owned();
    wait_until("it is ready", || {
        place.control(&["get_server_status", &server]).out == "ACTIVE\n"
    });
    let own = lines[1..].join("\n") + "\n";
    let all = place.control(&["device_query"]).out;
    assert_eq!(all, format!("{}\nServer {server}\n{own}", before.out));
    let one = place.control(&["device_query", &server]).out;
    assert_eq!(one, all);
    wait_until("the server notes it", || {
        let noted = "Received device query command. There are 2 devices";
        place.log("server.log").matches(noted).count() == 2
    });
    let csv = place.control(&["device_query", &server, "--csv"]).out;
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines[1], "Device Ordinal,PCI IDs,UUID,Name,Attributes");
    assert!(lines.len() == 9 && lines[2].starts_with("0,") && lines[2].ends_with(",N/A"));
    let csv = place
        .control(&["device_query", &server, "--format=csv"])
        .out;
    assert_eq!(
        csv.lines().next(),
        Some("server,device,pci,uuid,name,memory,compute_mode")
    );
    assert_eq!(csv.lines().count(), 5);
}

#[test]
fn devices_that_cannot_be_listed() {
    for (env, why) in [
        (
            ("FAKE_SERVER", "crash"),
            "ended with exit status: 3; server.log may say more",
        ),
        (
            ("MPSSHIM_SERVER", "/nowhere/mps-server"),
            "cannot start the server /nowhere/mps-server",
        ),
    ] {
        let place = Place::with_daemon_env(&[env]);
        let done = place.control(&["device_query"]);
        assert_eq!(done.code, 1);
        assert!(done.out.contains(why), "{}", done.out);
    }
    // Nobody else waits for it.
    let place = Place::with_daemon_env(&[("FAKE_SERVER", "stuck")]);
    let mut command = place.command("mps-control");
    let mut waits = command.arg("device_query").spawn().expect("mps-control");
    let searches = || {
        let daemon = place.daemon_pid();
        let children = std::fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"));
        children.expect("children").trim().to_owned()
    };
    wait_until("the search has begun", || !searches().is_empty());
    let search = searches();
    let begun = std::time::Instant::now();
    assert_eq!(place.control(&["get_server_list"]).code, 0);
    assert!(begun.elapsed().as_secs() < 5);
    waits.kill().expect("kill");
    waits.wait().expect("wait");
    // And it ends with the daemon.
    assert_eq!(place.control(&["quit"]).code, 0);
    wait_until("the search has ended", || {
        let stat = std::fs::read_to_string(format!("/proc/{search}/stat"));
        stat.is_ok_and(|stat| stat.contains(") Z"))
            || !std::path::Path::new(&format!("/proc/{search}")).exists()
    });
}

#[test]
fn only_the_owner_changes_anything() {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    for command in [
        &["set_default_active_thread_percentage", "50"][..],
        &["set_active_thread_percentage", "1", "50"],
        &["set_active_thread_percentage_all", "50"],
        &["set_default_device_pinned_mem_limit", "0", "1G"],
        &["set_device_pinned_mem_limit", "1", "0", "1G"],
        &["set_user_device_pinned_mem_limit", "1", "0", "1G"],
        &["set_default_device_mem_guarantee", "0", "1G"],
        &["set_device_mem_guarantee", "1", "0", "1G"],
        &["set_user_device_mem_guarantee", "1", "0", "1G"],
        &["set_default_client_priority", "1"],
        &["set_scheduling", "fifo"],
        &["set_scheduling", "fifo", "1"],
        &["set_client_weight", "1", "1", "5"],
    ] {
        let done = place.control_as(user, command);
        assert_eq!(done.code, 1, "{command:?}");
        let refusal = "reserved for root and the user who runs the daemon";
        assert!(done.out.contains(refusal), "{}", done.out);
    }
    for command in [
        &["get_default_active_thread_percentage"][..],
        &["get_active_thread_percentage_all"],
        &["get_default_device_pinned_mem_limit", "0"],
        &["get_user_device_pinned_mem_limit", "1", "0"],
        &["get_default_device_mem_guarantee", "0"],
        &["get_user_device_mem_guarantee", "1", "0"],
        &["get_default_client_priority"],
        &["get_scheduling"],
        &["device_query"],
    ] {
        assert_eq!(place.control_as(user, command).code, 0, "{command:?}");
    }
}
