//! mps-control at a pseudo-terminal.

use mpsshim_tests::control_daemon::{Place, wait_until};
use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::{Read, Write};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// mps-control at a terminal.
pub struct Session {
    pub program: Child,
    keys: File,
    pub screen: Arc<Mutex<String>>,
}

impl Session {
    pub fn start(place: &Place, arguments: &[&str]) -> Session {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let terminal = openpty(&size, None).expect("a terminal");
        let mut command = place.command("mps-control");
        command
            .args(arguments)
            .env("TERM", "xterm")
            .env("XDG_STATE_HOME", place.path().join("state"))
            .stdin(terminal.slave.try_clone().expect("descriptor"))
            .stdout(terminal.slave.try_clone().expect("descriptor"))
            .stderr(terminal.slave);
        let program = command.spawn().expect("run");
        // The command holds the other side open as long as it lives.
        drop(command);
        let keys = File::from(terminal.master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut output, shown) = (keys.try_clone().expect("descriptor"), screen.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = output.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..len]);
                shown.lock().expect("screen").push_str(&text);
            }
        });
        Session {
            program,
            keys,
            screen,
        }
    }

    /// Waits until the text is on the screen, wherever the cursor has been in between.
    pub fn displays(&self, text: &str) {
        wait_until(&format!("the screen displays {text:?}"), || {
            self.display().contains(text)
        });
    }

    /// The screen as one sees it.
    pub fn display(&self) -> String {
        let written = self.screen.lock().expect("screen").clone();
        let mut parser = vt100::Parser::default();
        parser.process(written.as_bytes());
        parser.screen().contents()
    }

    /// Waits until the program has written this.
    pub fn shows(&self, text: &str) {
        wait_until(&format!("the screen shows {text:?}"), || {
            self.screen.lock().expect("screen").contains(text)
        });
    }

    /// What is typed while no line is read may be lost.
    pub fn settles(&self) {
        let mut before = String::new();
        wait_until("the screen does not change", || {
            let now = self.screen.lock().expect("screen").clone();
            std::thread::sleep(Duration::from_millis(200));
            std::mem::replace(&mut before, now.clone()) == now
        });
    }

    pub fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("type");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
