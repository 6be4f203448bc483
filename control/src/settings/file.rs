//! The TOML file for settings: a line `key = value` for each, with the keys of [`TABLE`].

use super::{Given, SettingsError, TABLE};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// The file that is read when none is named.
pub const DEFAULT_FILE: &str = "/etc/mpsshim/config.toml";

/// Values of a file, by the environment variable of each setting.
pub type Values = BTreeMap<&'static str, Given>;

/// Reads the file that was named, or [`DEFAULT_FILE`], which need not be there.
///
/// # Errors
/// The file cannot be read, is not TOML, has an unknown key, or a value that is neither text nor a number. The error
/// begins with `FILE:LINE:`.
pub fn read(named: Option<&Path>) -> Result<Values, SettingsError> {
    let path = named.unwrap_or(Path::new(DEFAULT_FILE));
    match fs::read_to_string(path) {
        Ok(text) => parse(&text, &path.display().to_string()),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => {
            Ok(Values::new())
        }
        Err(error) => Err(SettingsError::File(format!(
            "cannot read the configuration {}: {error}",
            path.display()
        ))),
    }
}

fn parse(text: &str, path: &str) -> Result<Values, SettingsError> {
    let line = |place: Range<usize>| text[..place.start].matches('\n').count() + 1;
    let at = |place| format!("{path}:{}", line(place));
    let wrong = |place, what: String| Err(SettingsError::File(format!("{}: {what}", at(place))));
    let table = match DeTable::parse(text) {
        Ok(table) => table.into_inner(),
        Err(error) => return wrong(error.span().unwrap_or_default(), error.message().to_owned()),
    };
    let mut values = Values::new();
    for (key, value) in table {
        let place = key.span();
        let key = key.into_inner();
        let Some(setting) = TABLE.iter().find(|row| row.key == Some(&*key)) else {
            let keys: Vec<&str> = TABLE.iter().filter_map(|row| row.key).collect();
            return wrong(
                place,
                format!("unknown key {key}; there are {}", keys.join(", ")),
            );
        };
        let value = match value.into_inner() {
            DeValue::String(text) => text.into_owned(),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(is_so) => is_so.to_string(),
            _ => return wrong(place, format!("{key} must be text or a number")),
        };
        let given = Given {
            told: format!("{}: {key} = {value}", at(place)),
            value: value.into(),
            in_file: true,
        };
        values.insert(setting.name, given);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::super::{ACTIVE_THREAD_PERCENTAGE, MAX_CLIENTS, MODE, REQUIRED};
    use super::*;

    fn values(text: &str) -> Result<Vec<(&'static str, String)>, String> {
        let values = parse(text, "config.toml").map_err(|error| error.to_string())?;
        Ok(values
            .into_iter()
            .map(|(name, given)| (name, given.value.into_string().expect("text")))
            .collect())
    }

    #[test]
    fn text_and_numbers_are_values() {
        let text = "# of ours\nmode = \"proxy,1=direct\"\nmax_clients = 64\nactive_thread_percentage = 33.5\n\
                    required = true\n";
        let expected = [
            (ACTIVE_THREAD_PERCENTAGE, "33.5".to_owned()),
            (MAX_CLIENTS, "64".to_owned()),
            (MODE, "proxy,1=direct".to_owned()),
            (REQUIRED, "true".to_owned()),
        ];
        assert_eq!(values(text), Ok(expected.to_vec()));
        assert_eq!(values(""), Ok(vec![]));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, said) in [
            (
                "mode = \"proxy\"\n\nmax_client = 3\n",
                "config.toml:3: unknown key max_client; there are pipe_directory, ",
            ),
            ("clients = 1", "config.toml:1: unknown key clients; "),
            // Settings that a file cannot contain.
            ("disable = 1", "config.toml:1: unknown key disable; "),
            (
                "log = [\"debug\"]",
                "config.toml:1: log must be text or a number",
            ),
            (
                "\n[mode]\n0 = \"direct\"",
                "config.toml:2: mode must be text or a number",
            ),
            (
                "log = \"info\"\nlog = \"debug\"",
                "config.toml:2: duplicate key",
            ),
            ("log = \"info\"\nmode = proxy", "config.toml:2: "),
        ] {
            let error = values(text).expect_err(text);
            assert!(error.starts_with(said), "{text}: {error}");
        }
    }

    #[test]
    fn only_the_usual_file_may_be_missing() {
        let none = tempfile::tempdir().expect("directory").path().join("none");
        let error = read(Some(&none)).expect_err("no file").to_string();
        assert!(
            error.starts_with("cannot read the configuration ") && error.contains("/none: No such"),
            "{error}"
        );
    }

    #[test]
    fn the_sample_has_every_key_at_its_default_or_as_an_example() {
        let sample = include_str!("../../../packaging/config.toml");
        assert_eq!(values(sample), Ok(vec![]), "nothing is set");
        let commented = sample.lines().filter_map(|line| line.strip_prefix('#'));
        let settings: Vec<&str> = commented.filter(|line| !line.starts_with(' ')).collect();
        let given = parse(&settings.join("\n"), "sample").expect("valid");
        let keys = TABLE.iter().filter(|row| row.key.is_some());
        assert_eq!(given.keys().copied().collect::<Vec<_>>(), {
            let mut names: Vec<_> = keys.map(|row| row.name).collect();
            names.sort_unstable();
            names
        });
        super::super::Settings::from_given(|name| given.get(name).cloned(), true).expect("valid");
    }
}
