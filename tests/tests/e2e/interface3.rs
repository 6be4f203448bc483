//! Interface 3 (`-p 3`): modules and verbs, with the text that they print.

use mpsshim_tests::control_daemon::{Client, Place, other_user, wait_until};

/// A command of interface 3.
fn ask(place: &Place, line: &str) -> (i32, String) {
    let words: Vec<&str> = ["-p", "3"].into_iter().chain(line.split(' ')).collect();
    let done = place.control(&words);
    assert_eq!(done.err, "", "{line}");
    (done.code, done.out)
}

fn check(place: &Place, line: &str, code: i32, expected: &str) {
    assert_eq!(ask(place, line), (code, expected.to_owned()), "{line}");
}

/// The text that the transcript has for a value which differs from run to run.
fn with_names(text: &str, names: &[(String, &str)]) -> String {
    names.iter().fold(text.to_owned(), |text, (value, name)| {
        text.replace(value.as_str(), name)
    })
}

#[test]
fn servers_clients_and_devices_are_listed() {
    let place = Place::with_daemon();
    let uid = place.uid();
    check(&place, "server list --format=csv,noheader", 0, "");
    check(
        &place,
        "client list",
        0,
        "PID  SERVER  DEVICE  PCI-ID  LINUX-NS  MAWS-NS  CMD\n",
    );
    let client = Client::connect(&place);
    let server = client.welcome().expect("welcome").server_pid;
    let own = std::process::id();
    wait_until("the client is listed", || {
        !ask(&place, "client list --format=csv,noheader")
            .1
            .is_empty()
    });
    let name = format!("uid_{uid}");
    let namespace = std::fs::read_link("/proc/self/ns/pid").expect("a namespace");
    let namespace = namespace
        .to_string_lossy()
        .replace("pid:[", "")
        .replace(']', "");
    let program = ask(&place, &format!("client get {own} cmd")).1;
    let names = [
        (place.pipe().display().to_string(), "PIPE"),
        (program.trim().to_owned(), "PROGRAM"),
    ];
    let csv = |line: &str| with_names(&ask(&place, line).1, &names);
    assert_eq!(
        csv("server list --format=csv"),
        format!(
            "name,uid,pid,status,pipe-directory,allowed-devices,context-ids\n{name},{uid},{server},ACTIVE,PIPE,all,1\n"
        )
    );
    assert_eq!(
        csv(&format!("server list {name} --format=csv,noheader")),
        format!("{name},{uid},{server},ACTIVE,PIPE,all,1\n")
    );
    let device = ask(&place, &format!("client get {own} device")).1;
    let device = device.trim();
    let rows = format!("{own},{name},{device},0000:00:06.0,{namespace},,PROGRAM\n");
    assert_eq!(
        csv("client list --all --format=csv"),
        format!("pid,server,device,pci-id,linux-ns,maws-ns,cmd\n{rows}")
    );
    assert_eq!(
        csv(&format!(
            "client list --server={name} --format=csv,noheader"
        )),
        rows
    );
    for (field, value) in [
        ("pid", own.to_string()),
        ("server", name.clone()),
        ("pci-id", "0000:00:06.0".to_owned()),
        ("linux-ns", namespace.clone()),
    ] {
        check(
            &place,
            &format!("client get {own} {field}"),
            0,
            &format!("{value}\n"),
        );
    }
    for (field, value) in [
        ("name", format!("{name}\n")),
        ("uid", format!("{uid}\n")),
        ("pid", format!("{server}\n")),
        ("status", "ACTIVE\n".to_owned()),
        ("pipe-directory", format!("{}\n", place.pipe().display())),
        ("allowed-devices", "all\n".to_owned()),
        ("context-ids", "1\n".to_owned()),
        ("pinned-memory-limit", String::new()),
        ("active-thread-percentage", "100.0\n".to_owned()),
        ("client-priority", "0\n".to_owned()),
    ] {
        check(&place, &format!("server get {name} {field}"), 0, &value);
    }
    let devices = ask(&place, "device list").1;
    let devices: Vec<Vec<&str>> = devices
        .lines()
        .map(|line| {
            line.split("  ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .collect()
        })
        .collect();
    let row = |server| {
        vec![
            "0",
            server,
            "0000:00:06.0",
            device,
            "Fake device",
            "0",
            "0",
            "N/A",
        ]
    };
    let header = "ORDINAL SERVER PCI-ID UUID NAME TOTAL-SMS TOTAL-CHUNKS ATTRIBUTES";
    assert_eq!(
        devices,
        [header.split(' ').collect(), row("-"), row(name.as_str())]
    );
    // The other commands work as ever, as does the format of the program.
    check(&place, "get_server_list", 0, &format!("{server}\n"));
    let json = place
        .control(&["-p", "3", "--format=json", "server", "list"])
        .out;
    assert!(
        json.starts_with(&format!(
            "[{{\"allowed-devices\":\"all\",\"context-ids\":[1],\"name\":\"{name}\""
        )),
        "{json}"
    );
}

#[test]
fn commands_come_from_arguments_the_environment_and_standard_input() {
    let mut place = Place::with_daemon();
    let refused = place.control(&["server", "list"]);
    let hint = "Unknown command \"server\"; it is a module of interface 3: give -p 3, or set CUDA_MPS_PROTOCOL_VERSION=3\n";
    assert_eq!((refused.code, refused.out.as_str()), (1, hint));
    place.set_env("CUDA_MPS_PROTOCOL_VERSION", "3");
    let header = "NAME  UID  PID  STATUS  PIPE-DIRECTORY  ALLOWED-DEVICES  CONTEXT-IDS\n";
    let done = place.control(&["server", "list"]);
    assert_eq!((done.code, done.out.as_str()), (0, header));
    let done = place.control_stdin("server list\nserver lst\nget_default_client_priority\n");
    let wrong = "server: unknown verb \"lst\"; did you mean list?; verbs: ";
    assert_eq!(done.code, 0);
    assert!(
        done.out.starts_with(&format!("{header}{wrong}")) && done.out.ends_with("\n0\n"),
        "{}",
        done.out
    );
    // The option takes precedence.
    assert_eq!(place.control(&["-p", "2", "server", "list"]).out, hint);
    place.set_env("CUDA_MPS_PROTOCOL_VERSION", "4");
    let done = place.control(&["server", "list"]);
    assert_eq!(done.code, 2);
    let wrong = "CUDA_MPS_PROTOCOL_VERSION: \"4\" is no version of the interface: 2 or 3";
    assert!(done.err.contains(wrong), "{}", done.err);
}

#[test]
fn mistakes_are_refused() {
    let place = Place::with_daemon();
    for (line, expected) in [
        (
            "servr list",
            "Unknown module \"servr\"; did you mean server?\n",
        ),
        (
            "frobnicate",
            "Unknown module \"frobnicate\"; modules: server, namespace, client, device, sm-partition, feature, memacct\n",
        ),
        (
            "server get nn pid",
            "Server \"nn\" not found; server list lists the servers\n",
        ),
        (
            "server list nn",
            "Server \"nn\" not found; server list lists the servers\n",
        ),
        (
            "client list --server=nn",
            "Server \"nn\" not found; server list lists the servers\n",
        ),
        (
            "client get 1 cmd",
            "Client 1 not found; client list lists the clients\n",
        ),
        (
            "client terminate 1",
            "Client 1 not found; client list lists the clients\n",
        ),
        (
            "device list now",
            "device list: unexpected \"now\"; usage: device list [--format=table|csv|json[,noheader]]\n",
        ),
        (
            "device list --format=xml",
            "device list: \"xml\": a format is table, csv or json, and noheader may follow table and csv; usage: device list \
             [--format=table|csv|json[,noheader]]\n",
        ),
    ] {
        check(&place, line, 1, expected);
    }
    if let Some(user) = other_user() {
        let refused = place.control_as(user, &["-p", "3", "client", "terminate", "1"]);
        let reserved = "client terminate is reserved for root and the user who runs the daemon\n";
        assert_eq!((refused.code, refused.out.as_str()), (1, reserved));
        let log = place.log("control.log");
        assert!(
            log.contains(&format!("of user {user} refused: {}", reserved.trim())),
            "{log}"
        );
    }
}

#[test]
fn features_are_described_and_cannot_be_switched() {
    let place = Place::with_daemon();
    let memacct = "device memory is accounted for each client, for limits, ps, top and the metrics";
    let share = "clients in proxy mode share their server's context on each device";
    let audit = "no log of each allocation is written; ps, top and the metrics show the device memory of each client";
    for (line, code, expected) in [
        (
            "feature describe --format=csv",
            0,
            format!("feature,state,description\nmemacct,enabled,\"{memacct}\"\ncontext-share,enabled,{share}\n"),
        ),
        (
            "feature describe context-share --format=csv,noheader",
            0,
            format!("context-share,enabled,{share}\n"),
        ),
        ("feature enable memacct", 0, String::new()),
        ("feature enable context-share", 0, String::new()),
        (
            "feature disable memacct",
            1,
            "feature disable: memacct cannot be disabled: limits of device memory need it; usage: feature disable \
             FEATURE\n"
                .to_owned(),
        ),
        (
            "feature disable context-share",
            1,
            "feature disable: context-share cannot be disabled: start a program that needs a context of its own in \
             direct mode (mps-run --mode direct); usage: feature disable FEATURE\n"
                .to_owned(),
        ),
        (
            "feature enable memact",
            1,
            "feature enable: unknown feature \"memact\"; did you mean memacct?; features: memacct, context-share; \
             usage: feature enable FEATURE\n"
                .to_owned(),
        ),
        (
            "memacct describe --format=csv",
            0,
            format!("setting,value,description\naudit_log,false,\"{audit}\"\n"),
        ),
        ("memacct set audit_log=false", 0, String::new()),
        (
            "memacct set audit_log=true",
            1,
            format!("memacct set: {audit}; usage: memacct set audit_log=false\n"),
        ),
        (
            "memacct set audit_log",
            1,
            "memacct set: \"audit_log\": audit_log=true or audit_log=false expected; usage: memacct set \
             audit_log=false\n"
                .to_owned(),
        ),
    ] {
        check(&place, line, code, &expected);
    }
    if let Some(user) = other_user() {
        for (line, verb) in [
            ("feature enable memacct", "feature enable"),
            ("memacct set audit_log=false", "memacct set"),
            ("sm-partition delete a", "sm-partition delete"),
        ] {
            let words: Vec<&str> = ["-p", "3"].into_iter().chain(line.split(' ')).collect();
            let refused = place.control_as(user, &words);
            let reserved =
                format!("{verb} is reserved for root and the user who runs the daemon\n");
            assert_eq!((refused.code, refused.out), (1, reserved));
        }
    }
}

#[test]
fn help_needs_no_daemon() {
    let place = Place::new();
    let expected = "device: the devices of the daemon and of each server\n\n\
                    device list [--format=table|csv|json[,noheader]]\n    \
                    list the devices; rows without a server are the daemon's own list\n    \
                    --format: output format; noheader leaves out the line with the names of the columns\n";
    check(&place, "device --help", 0, expected);
    let (code, text) = ask(&place, "client terminate --help");
    assert_eq!(code, 0);
    assert!(
        text.starts_with("client terminate PID\n    end a client: "),
        "{text}"
    );
    let done = place.control(&["-p", "3", "device", "list"]);
    let absent = "Cannot find MPS control daemon process\n";
    assert_eq!((done.code, done.err.as_str()), (1, absent));
}

#[test]
fn the_daemon_is_ended_by_an_option() {
    for options in [&["--quit"][..], &["-p", "3", "-q"], &["-p", "3", "--quit"]] {
        let place = Place::with_daemon();
        let done = place.control(options);
        assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
        assert_eq!(place.control(&["get_server_list"]).code, 1, "{options:?}");
    }
    let place = Place::new();
    let wrong = place.control(&["--quit", "ps"]);
    assert_eq!(wrong.code, 2);
}
