//! The environment in which the loader gives a program the library: set by mps-run, or printed for shells and images.

use clap::ValueEnum;
use serde_json::{Map, Value};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The loader's list of libraries to load before a program's own.
pub const PRELOAD: &str = "LD_PRELOAD";
/// The loader's list of directories.
pub const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// Forms in which variables are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// Commands for a shell: eval "$(mps-run --print-env)"
    Sh,
    /// Instructions ENV, without the values of this environment
    Dockerfile,
    /// An object, for job scripts
    Json,
}

/// Variables and their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(Vec<(&'static str, OsString)>);

impl Environment {
    /// Adds a variable.
    pub fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.0.push((name, value.into()));
    }

    /// Adds the list `name` with `first` in front of the entries that it has now.
    pub fn set_first(&mut self, name: &'static str, first: &Path, present: Option<&OsStr>) {
        self.set(name, in_front(first, present));
    }

    /// The variables.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &OsStr)> {
        self.0
            .iter()
            .map(|(name, value)| (*name, value.as_os_str()))
    }

    /// The text in a form.
    pub fn print(&self, form: Form) -> Vec<u8> {
        match form {
            Form::Sh => self.exports(),
            Form::Dockerfile => self.instructions(),
            Form::Json => {
                let text = |value: &OsStr| Value::from(value.to_string_lossy());
                let fields = self.iter().map(|(name, value)| (name.into(), text(value)));
                let object = Value::Object(fields.collect::<Map<_, _>>());
                format!("{object:#}\n").into_bytes()
            }
        }
    }

    fn exports(&self) -> Vec<u8> {
        let line = |(name, value): (&str, &OsStr)| {
            let assignment = format!("export {name}=").into_bytes();
            [assignment, word(value), b"\n".to_vec()].concat()
        };
        self.iter().flat_map(line).collect()
    }

    fn instructions(&self) -> Vec<u8> {
        let escape = |value: &OsStr| {
            let value = value.to_string_lossy();
            let special = |c: char| "\\\"$".contains(c).then_some('\\');
            let escaped = value
                .chars()
                .flat_map(|c| special(c).into_iter().chain([c]));
            escaped.collect::<String>()
        };
        let line = |(name, value): (&str, &OsStr)| format!("ENV {name}=\"{}\"\n", escape(value));
        self.iter().map(line).collect::<String>().into_bytes()
    }
}

/// A value as one word of a shell.
fn word(value: &OsStr) -> Vec<u8> {
    let parts: Vec<&[u8]> = value.as_bytes().split(|byte| *byte == b'\'').collect();
    [b"'", parts.join(&b"'\\''"[..]).as_slice(), b"'"].concat()
}

/// The entry in front of a list: the library's symbols must take precedence.
fn in_front(first: &Path, present: Option<&OsStr>) -> OsString {
    let mut value = first.as_os_str().to_owned();
    if let Some(present) = present.filter(|present| !present.is_empty()) {
        value.push(":");
        value.push(present);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stay_behind_the_first() {
        let shim = Path::new("/opt/libmpsshim.so");
        for (present, expected) in [
            ("", "/opt/libmpsshim.so"),
            ("/a.so /b.so", "/opt/libmpsshim.so:/a.so /b.so"),
        ] {
            assert_eq!(in_front(shim, Some(OsStr::new(present))), expected);
        }
        assert_eq!(in_front(shim, None), "/opt/libmpsshim.so");
    }

    #[test]
    fn values_are_quoted() {
        let mut environment = Environment::default();
        environment.set("A", "it's \"$B\" \\");
        environment.set("C", "/run/x");
        let text = |form| String::from_utf8(environment.print(form)).expect("text");
        assert_eq!(
            text(Form::Sh),
            "export A='it'\\''s \"$B\" \\'\nexport C='/run/x'\n"
        );
        assert_eq!(
            text(Form::Dockerfile),
            "ENV A=\"it's \\\"\\$B\\\" \\\\\"\nENV C=\"/run/x\"\n"
        );
        let object: Value = serde_json::from_str(&text(Form::Json)).expect("JSON");
        assert_eq!(object["A"], "it's \"$B\" \\");
        assert_eq!(object["C"], "/run/x");
    }
}
