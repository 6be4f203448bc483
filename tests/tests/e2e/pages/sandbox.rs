//! A place where a document's commands can be run: a daemon, a server, a client, and a folder with what they speak of.

use mpsshim_tests::artifacts::{artifact, driver, write_program};
use mpsshim_tests::control_daemon::{Done, Place};
use mpsshim_tests::programs::{DriverFolder, Running, client, shell};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// What documents say, and what stands for it here.
const PATHS: &[(&str, &str)] = &[
    ("/usr/lib/mpsshim/libmpsshim.so", "@library"),
    ("/usr/local/share", "@place"),
    ("/etc/cdi", "@place"),
    ("/tmp/trace.json", "@place/trace.json"),
    ("/run/mpsshim/UID", "@pipe"),
    // One that is free.
    ("127.0.0.1:9400", "127.0.0.1:0"),
    ("python train.py", "./program"),
    ("python serve.py --workers 4", "./program"),
    ("python engine.py --port 8001", "./program"),
    ("python engine.py --port 8002", "./program"),
];

/// The same for whole words.
const WORDS: &[(&str, &str)] = &[
    ("PID", "@server"),
    ("SERVER_PID", "@server"),
    ("SERVER", "@server"),
    ("1110", "@server"),
    ("CLIENT_PID", "@client"),
    ("CLIENT", "@client"),
    ("1123", "@client"),
    ("UID", "@uid"),
    ("DEVICE", "0"),
    ("AMOUNT", "3G"),
    ("PROGRAM", "/opt/nbody/nbody"),
    // Both a percentage and a priority.
    ("P", "1"),
    ("MS", "20"),
    ("WEIGHT", "300"),
    ("SECONDS", "1"),
    ("FILE", "@place/trace.json"),
];

/// A folder with what the documents speak of, and a daemon if need be.
pub struct Sandbox {
    pub place: Place,
    /// A client that holds a context, and its server.
    pub client: Option<(Running, u32)>,
    /// Where a program that is not served finds the driver.
    _driver: DriverFolder,
}

impl Sandbox {
    /// Without a daemon.
    pub fn new() -> Sandbox {
        let mut place = Place::new();
        let folder = DriverFolder::new();
        let text = |path: &Path| path.to_str().expect("text").to_owned();
        for (name, value) in [
            ("MPSSHIM_SERVER", text(&artifact("mps-server"))),
            ("MPSSHIM_LIBRARY", text(&artifact("libmpsshim.so"))),
            ("MPSSHIM_CUDA_LIBRARY", text(&driver())),
            // The documents' limits are those of a GPU.
            ("SOFTGPU_MEMORY", (80u64 << 30).to_string()),
            ("HOME", text(place.path())),
            ("LD_LIBRARY_PATH", text(folder.path())),
        ] {
            place.set_env(name, &value);
        }
        // The last of two options counts.
        let script = format!(
            "#!/bin/sh\nexec {} \"$@\" -numbodies=256 -i=2\n",
            artifact("nbody").display()
        );
        for name in ["nbody", "program", "batch"] {
            write_program(&place.path().join(name), &script);
        }
        let share = [
            "man/man1",
            "bash-completion/completions",
            "zsh/site-functions",
        ];
        for folder in share.iter().chain(&["fish/vendor_completions.d"]) {
            fs::create_dir_all(place.path().join(folder)).expect("directory");
        }
        Sandbox {
            place,
            client: None,
            _driver: folder,
        }
    }

    /// With a daemon, a server and a client.
    pub fn with_daemon() -> Sandbox {
        let mut sandbox = Sandbox::new();
        let started = sandbox.place.control(&["-d"]);
        assert_eq!((started.code, started.err.as_str()), (0, ""));
        let mut command = client(&sandbox.place, &["idle"]);
        let client = Running::start_until(&mut command, "ready");
        let server = sandbox.place.control(&["get_server_list"]).out;
        let server = server.trim().parse().expect("one server");
        sandbox.client = Some((client, server));
        sandbox
    }

    /// Whether the daemon, the server and the client are there, and nobody else.
    pub fn is_ready(&self) -> bool {
        let Some((client, server)) = &self.client else {
            return false;
        };
        let list = |words: &[&str]| self.place.control(words).out;
        list(&["get_server_list"]) == format!("{server}\n")
            && list(&["get_client_list", &server.to_string()]) == format!("{}\n", client.pid())
    }

    pub fn clients_so_far(&self) -> usize {
        let log = self.place.pipe().join("logs/control.log");
        let log = fs::read_to_string(log).unwrap_or_default();
        log.matches("NEW CLIENT").count()
    }

    /// A command as this machine can run it.
    pub fn translated(&self, text: &str) -> String {
        let mut line = text.to_owned();
        for (from, to) in PATHS {
            line = line.replace(from, to);
        }
        let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let mut out = String::new();
        let mut rest = line.as_str();
        while !rest.is_empty() {
            let end = rest.find(|letter| !is_word(letter)).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            let known = WORDS.iter().find(|(from, _)| *from == word);
            // A variable of the shell is its own.
            out += match known {
                Some((_, to)) if !out.ends_with('$') => to,
                _ => word,
            };
            let end = after.find(is_word).unwrap_or(after.len());
            out += &after[..end];
            rest = &after[end..];
        }
        self.with_values(&out)
    }

    /// With what this place has for the words that begin with `@`.
    pub fn with_values(&self, text: &str) -> String {
        let mut out = text.to_owned();
        let (client, server) = match &self.client {
            Some((client, server)) => (client.pid(), *server),
            None => (0, 0),
        };
        for (name, value) in [
            ("@library", artifact("libmpsshim.so").display().to_string()),
            ("@place", self.place.path().display().to_string()),
            ("@pipe", self.place.pipe().display().to_string()),
            ("@server", server.to_string()),
            ("@client", client.to_string()),
            ("@uid", self.place.uid().to_string()),
        ] {
            out = out.replace(name, &value);
        }
        out
    }

    pub fn shell(&self, line: &str) -> Done {
        let mut command = shell(&self.place, self.place.path(), line);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CUDA_")) {
            command.env_remove(name);
        }
        Running::start(&mut command).finish(Duration::from_secs(60))
    }
}
