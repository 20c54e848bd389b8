//! An algorithm as it is asked for: a codec and its parameters, read from `NAME(key=value,...)`. Names and ranges are
//! zram's (`algorithm_params`). Nothing here opens a file: that is [`Algorithm::load`]'s.
//!
//! What is read is complete: a parameter that was not given has its default, and printing gives a text that reads back
//! to the same.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{deflate, lz4, lz4hc, zstd};

/// A codec's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Lz4,
    Lzo,
    LzoRle,
    E842,
    Lz4hc,
    Zstd,
    Deflate,
}

/// In the order in which messages name them: from fast to dense.
const NAMES: [Name; 7] = [
    Name::Lz4,
    Name::Lzo,
    Name::LzoRle,
    Name::E842,
    Name::Lz4hc,
    Name::Zstd,
    Name::Deflate,
];

/// What a codec's level can be.
struct Levels {
    min: i32,
    max: i32,
    default: i32,
    /// The level that another one is only a way of writing, as (written, meant).
    alias: Option<(i32, i32)>,
}

impl Name {
    pub(super) fn text(self) -> &'static str {
        match self {
            Name::Lz4 => "lz4",
            Name::Lzo => "lzo",
            Name::LzoRle => "lzo-rle",
            Name::E842 => "842",
            Name::Lz4hc => "lz4hc",
            Name::Zstd => "zstd",
            Name::Deflate => "deflate",
        }
    }

    /// The parameters that a codec takes, for messages.
    fn keys(self) -> &'static str {
        match self {
            Name::Lz4 | Name::Lz4hc | Name::Zstd => "level, dict",
            Name::Deflate => "level, winbits",
            Name::Lzo | Name::LzoRle | Name::E842 => "none",
        }
    }

    fn levels(self) -> Option<Levels> {
        let levels = |min, max, default, alias| Levels {
            min,
            max,
            default,
            alias,
        };
        match self {
            Name::Lz4 => Some(levels(lz4::LEVEL_MIN, lz4::LEVEL_MAX, lz4::LEVEL_DEFAULT, None)),
            Name::Lz4hc => Some(levels(lz4hc::LEVEL_MIN, lz4hc::LEVEL_MAX, lz4hc::LEVEL_DEFAULT, None)),
            Name::Zstd => Some(levels(
                zstd::LEVEL_MIN,
                zstd::LEVEL_MAX,
                zstd::LEVEL_DEFAULT,
                Some((0, zstd::LEVEL_OF_ZERO)),
            )),
            Name::Deflate => Some(levels(
                -1,
                9,
                deflate::LEVEL_DEFAULT,
                Some((-1, deflate::LEVEL_DEFAULT)),
            )),
            Name::Lzo | Name::LzoRle | Name::E842 => None,
        }
    }

    /// The largest dictionary in bytes; `None` when the codec takes none.
    pub(super) fn dictionary_bytes_max(self) -> Option<usize> {
        match self {
            Name::Lz4 | Name::Lz4hc => Some(lz4::DICTIONARY_BYTES_MAX),
            Name::Zstd => Some(zstd::DICTIONARY_BYTES_MAX),
            Name::Deflate | Name::Lzo | Name::LzoRle | Name::E842 => None,
        }
    }

    fn has_window_bits(self) -> bool {
        matches!(self, Name::Deflate)
    }
}

/// A codec with its parameters, as text says it: `zstd(level=3,dict=/etc/vzram/pages.dict)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithm {
    pub(super) name: Name,
    /// In the codec's range; 0 for a codec without levels.
    pub(super) level: i32,
    /// deflate's: 9..=15, or negative for no header and checksum. 0 for others.
    pub(super) window_bits: i32,
    pub(super) dictionary: Option<PathBuf>,
}

/// Why a text names no [`Algorithm`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAlgorithmError {
    /// No codec has this name.
    #[error("unknown algorithm '{0}': it is one of {names}", names = names())]
    UnknownName(String),
    /// The text is not NAME or NAME(key=value,...), with each key once.
    #[error("'{0}' is not NAME or NAME(key=value,...)")]
    Form(String),
    /// The codec has no such parameter.
    #[error("{algorithm} has no parameter '{key}': it takes {known}")]
    UnknownKey {
        /// The codec.
        algorithm: &'static str,
        /// What was given.
        key: String,
        /// What it takes.
        known: &'static str,
    },
    /// A parameter's value is no number or outside its range.
    #[error("{algorithm}: {key}={value} is not in {range}")]
    Range {
        /// The codec.
        algorithm: &'static str,
        /// The parameter.
        key: &'static str,
        /// What was given.
        value: String,
        /// What it can be.
        range: String,
    },
    /// `dict=` without a path.
    #[error("{0}: dict= names no file")]
    NoPath(&'static str),
}

fn names() -> String {
    NAMES.map(Name::text).join(", ")
}

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    /// `NAME` or `NAME(key=value,...)`, as zram-generator writes it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || ParseAlgorithmError::Form(text.into());
        let (name, parameters) = match text.split_once('(') {
            None => (text, None),
            Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or_else(form)?)),
        };
        let name = NAMES.into_iter().find(|known| known.text() == name);
        let unknown_name = || ParseAlgorithmError::UnknownName(text.split('(').next().unwrap_or(text).into());
        let mut algorithm = Algorithm::of(name.ok_or_else(unknown_name)?);
        let mut keys = vec![];
        for parameter in parameters.iter().flat_map(|parameters| parameters.split(',')) {
            let (key, value) = parameter.split_once('=').ok_or_else(form)?;
            if keys.contains(&key.trim()) {
                return Err(form());
            }
            keys.push(key.trim());
            algorithm.set(key.trim(), value.trim())?;
        }
        Ok(algorithm)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Algorithm::of(self.name);
        let mut parameters = vec![];
        // lz4's is an acceleration, which hardly anybody sets; of the others one wants to know it.
        if self.level != default.level || (self.name != Name::Lz4 && self.name.levels().is_some()) {
            parameters.push(format!("level={}", self.level));
        }
        if self.window_bits != default.window_bits {
            parameters.push(format!("winbits={}", self.window_bits));
        }
        if let Some(path) = &self.dictionary {
            parameters.push(format!("dict={}", path.display()));
        }
        match parameters.is_empty() {
            true => f.pad(self.name.text()),
            false => f.pad(&format!("{}({})", self.name.text(), parameters.join(","))),
        }
    }
}

impl Default for Algorithm {
    /// lz4.
    fn default() -> Algorithm {
        Algorithm::of(Name::Lz4)
    }
}

impl Algorithm {
    /// The dictionary's path.
    pub fn dictionary(&self) -> Option<&Path> {
        self.dictionary.as_deref()
    }

    /// Whether the codec can use one.
    pub fn takes_dictionary(&self) -> bool {
        self.name.dictionary_bytes_max().is_some()
    }

    /// The same without its dictionary.
    pub fn without_dictionary(&self) -> Algorithm {
        Algorithm {
            dictionary: None,
            ..self.clone()
        }
    }

    /// Whether it stores less of most pages than `other`, by name and level, as measured (docs/benchmarks.md). A hint:
    /// pages and dictionaries differ.
    pub fn is_denser_than(&self, other: &Algorithm) -> bool {
        let rank = |algorithm: &Algorithm| {
            let by_name = match algorithm.name {
                Name::E842 => 0,
                Name::Lz4 => 1,
                Name::Lzo => 2,
                Name::LzoRle => 3,
                Name::Lz4hc => 4,
                Name::Deflate => 5,
                Name::Zstd if algorithm.level < -1 => 1,
                Name::Zstd => 6,
            };
            // lz4's level is an acceleration: the higher, the less dense.
            let by_level = if algorithm.name == Name::Lz4 {
                -algorithm.level
            } else {
                algorithm.level
            };
            (by_name, by_level)
        };
        rank(self) > rank(other)
    }

    fn of(name: Name) -> Algorithm {
        Algorithm {
            name,
            level: name.levels().map_or(0, |levels| levels.default),
            window_bits: if name.has_window_bits() {
                deflate::WINDOW_BITS_DEFAULT
            } else {
                0
            },
            dictionary: None,
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ParseAlgorithmError> {
        let algorithm = self.name.text();
        let range = |key, range| ParseAlgorithmError::Range {
            algorithm,
            key,
            value: value.into(),
            range,
        };
        match (key, self.name.levels()) {
            ("level", Some(Levels { min, max, alias, .. })) => {
                let level = value.parse().ok().filter(|level| (min..=max).contains(level));
                let level = level.ok_or_else(|| range("level", format!("{min}..{max}")))?;
                self.level = alias.filter(|alias| alias.0 == level).map_or(level, |alias| alias.1);
            }
            ("winbits", _) if self.name.has_window_bits() => {
                let (min, max) = (deflate::WINDOW_BITS_MIN, deflate::WINDOW_BITS_MAX);
                let bits = value.parse().ok();
                let bits = bits.filter(|bits: &i32| (min..=max).contains(&bits.unsigned_abs()));
                self.window_bits =
                    bits.ok_or_else(|| range("winbits", format!("{min}..{max} (zlib) or -{max}..-{min} (raw)")))?;
            }
            ("dict", _) if self.name.dictionary_bytes_max().is_some() => match value {
                "" => return Err(ParseAlgorithmError::NoPath(algorithm)),
                path => self.dictionary = Some(path.into()),
            },
            _ => {
                return Err(ParseAlgorithmError::UnknownKey {
                    algorithm,
                    key: key.into(),
                    known: self.name.keys(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denser_is_by_name_and_then_by_level() {
        let denser = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|text| text.parse::<Algorithm>().unwrap());
            one.is_denser_than(&other)
        };
        assert!(denser("zstd", "lz4") && !denser("lz4", "zstd"));
        assert!(denser("zstd(level=9)", "zstd(level=3)") && !denser("zstd", "zstd"));
        assert!(!denser("zstd(level=-5)", "lz4hc") && denser("zstd(level=-1)", "deflate"));
        assert!(denser("lz4", "lz4(level=9)") && denser("lz4hc", "lzo-rle") && !denser("842", "lz4"));
    }

    #[test]
    fn names_and_parameters_are_read_and_printed_alike() {
        for text in [
            "lz4",
            "lzo",
            "lzo-rle",
            "842",
            "lz4(level=7)",
            "lz4(dict=/a/b)",
            "lz4hc(level=12,dict=/a=b)",
            "zstd(level=-5)",
            "zstd(level=22,dict=relative)",
            "deflate(level=9)",
            "deflate(level=6,winbits=15)",
        ] {
            assert_eq!(text.parse::<Algorithm>().unwrap().to_string(), text);
        }
        for (text, means) in [
            ("zstd", "zstd(level=1)"),
            ("zstd(level=0)", "zstd(level=3)"),
            ("deflate", "deflate(level=6,winbits=-11)"),
            ("deflate( level = -1 )", "deflate(level=6)"),
            ("lz4hc", "lz4hc(level=9)"),
            ("lz4(level=1)", "lz4"),
        ] {
            assert_eq!(text.parse::<Algorithm>(), means.parse(), "{text}");
        }
    }

    #[test]
    fn every_level_of_a_range_is_taken_and_none_beside_it() {
        for name in NAMES {
            let Some(Levels { min, max, .. }) = name.levels() else {
                continue;
            };
            let parse = |level: i32| format!("{}(level={level})", name.text()).parse::<Algorithm>();
            assert!(parse(min).is_ok() && parse(max).is_ok());
            assert!(parse(min - 1).is_err() && parse(max + 1).is_err(), "{}", name.text());
        }
        for bits in -17..=17_i32 {
            let parsed = format!("deflate(winbits={bits})").parse::<Algorithm>();
            assert_eq!(parsed.is_ok(), (9..=15).contains(&bits.abs()), "{bits}");
        }
    }

    #[test]
    fn a_wrong_parameter_is_named_with_its_range() {
        let error = |text: &str| text.parse::<Algorithm>().unwrap_err().to_string();
        assert_eq!(error("zstd(level=23)"), "zstd: level=23 is not in -5..22");
        assert_eq!(error("zstd(level=x)"), "zstd: level=x is not in -5..22");
        assert_eq!(error("zstd(level=)"), "zstd: level= is not in -5..22");
        assert_eq!(error("lz4(level=0)"), "lz4: level=0 is not in 1..65537");
        assert_eq!(
            error("deflate(winbits=8)"),
            "deflate: winbits=8 is not in 9..15 (zlib) or -15..-9 (raw)"
        );
        assert_eq!(
            error("deflate(winbits=-2147483648)"),
            "deflate: winbits=-2147483648 is not in 9..15 (zlib) or -15..-9 (raw)"
        );
        assert_eq!(
            error("deflate(dict=/a)"),
            "deflate has no parameter 'dict': it takes level, winbits"
        );
        assert_eq!(
            error("lz4(winbits=9)"),
            "lz4 has no parameter 'winbits': it takes level, dict"
        );
        assert_eq!(error("zstd(dict=)"), "zstd: dict= names no file");
        assert_eq!(
            error("lzma"),
            "unknown algorithm 'lzma': it is one of lz4, lzo, lzo-rle, 842, lz4hc, zstd, deflate"
        );
        for text in [
            "zstd(level=1",
            "zstd()",
            "zstd(level=1,)",
            "zstd(level=1,level=2)",
            "zstd(level)",
            "zstd(dict=/a,b)",
        ] {
            assert_eq!(error(text), format!("'{text}' is not NAME or NAME(key=value,...)"));
        }
    }
}
