//! Sizes as people write them: `64MiB`, `2GiB`, `auto`.

use std::fmt;
use std::str::FromStr;

use crate::errors::UsageError;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const PIB: u64 = 1 << 50;
const EIB: u64 = 1 << 60;

/// Smallest region: four extents of files (256 KiB). Smaller ones would cost more in leases than they are
/// worth.
pub const REGION_MIN: ByteSize = ByteSize(MIB);
/// Largest region: a whole region is scrubbed at a time, and a GiB takes a good fraction of a second.
pub const REGION_MAX: ByteSize = ByteSize(GIB);

/// A number of bytes, never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit_bytes = match unit.trim_start() {
            "" | "B" => 1,
            "KiB" | "K" => KIB,
            "MiB" | "M" => MIB,
            "GiB" | "G" => GIB,
            "TiB" | "T" => TIB,
            "PiB" | "P" => PIB,
            "EiB" | "E" => EIB,
            _ => return Err("write a whole number and KiB, MiB, GiB or TiB, for instance 64MiB".into()),
        };
        if number.is_empty() {
            return Err("write a number and a unit, for instance 64MiB".into());
        }
        // It has digits only, so it is a number, but may be too large for one.
        match number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_bytes)) {
            Some(0) => Err("the size is zero: write a larger number and a unit, for instance 1MiB".into()),
            Some(bytes) => Ok(ByteSize(bytes)),
            None => Err("the size is too large: write a smaller one, for instance 2GiB".into()),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
        let Some((unit_bytes, unit)) = units.into_iter().find(|&(unit_bytes, _)| self.0 >= unit_bytes) else {
            return write!(f, "{} B", self.0);
        };
        if self.0.is_multiple_of(unit_bytes) {
            write!(f, "{} {unit}", self.0 / unit_bytes)
        } else {
            write!(f, "{:.1} {unit}", self.0 as f64 / unit_bytes as f64)
        }
    }
}

/// How much a node lends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// What the machine has to spare.
    Auto,
    /// This many bytes.
    Bytes(ByteSize),
}

/// How much memory a node leaves available to its machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reserve {
    /// A part of what the machine has.
    Auto,
    /// This many bytes, or none.
    Bytes(u64),
}

impl FromStr for Reserve {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Reserve::Auto),
            "0" => Ok(Reserve::Bytes(0)),
            size => size.parse().map(|ByteSize(bytes)| Reserve::Bytes(bytes)),
        }
    }
}

impl fmt::Display for Reserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reserve::Auto => f.write_str("auto"),
            Reserve::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" { Ok(Memory::Auto) } else { text.parse().map(Memory::Bytes) }
    }
}

/// Parses the size of a region, for an option.
pub fn parse_region_size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse()?;
    if !(REGION_MIN..=REGION_MAX).contains(&size) || !size.0.is_power_of_two() {
        return Err(format!("regions are powers of two from {REGION_MIN} to {REGION_MAX}"));
    }
    Ok(size)
}

/// A node's memory, rounded down to whole regions, and a remark if that is less than requested.
pub fn whole_regions(memory: ByteSize, region: ByteSize) -> Result<(ByteSize, Option<String>), UsageError> {
    if memory < region {
        let text =
            format!("{memory} is less than one region of {region}: raise --memory or lower --region-size");
        return Err(UsageError(text));
    }
    let rounded = ByteSize(memory.0 - memory.0 % region.0);
    let remark = format!("a node lends {rounded}: {memory} is rounded down to whole regions of {region}");
    Ok((rounded, (rounded != memory).then_some(remark)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("64MiB", 64 * MIB),
            ("2GiB", 2 * GIB),
            ("2 GiB", 2 * GIB),
            ("1G", GIB),
            ("4096", 4096),
            ("1TiB", TIB),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn a_reserve_is_auto_nothing_or_a_size_and_is_passed_on_as_it_is_read() {
        for (text, reserve) in
            [("auto", Reserve::Auto), ("0", Reserve::Bytes(0)), ("1MiB", Reserve::Bytes(MIB))]
        {
            assert_eq!(text.parse(), Ok(reserve));
            assert_eq!(reserve.to_string().parse(), Ok(reserve));
        }
        assert!("-1".parse::<Reserve>().is_err() && "none".parse::<Reserve>().is_err());
    }

    #[test]
    fn impossible_sizes_are_refused_with_an_example() {
        for text in [
            "",
            "0",
            "0GiB",
            "-1",
            "MiB",
            "1.5GiB",
            "64MB",
            "64 apples",
            "99999999999TiB",
            "99999999999999999999",
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains("for instance"), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_beyond_64_bits_are_too_large() {
        for text in ["99999999999999999999GiB", "99999999999TiB", "16EiB", "99999999999999999999"] {
            assert!(text.parse::<ByteSize>().unwrap_err().contains("too large"), "{text}");
        }
    }

    #[test]
    fn auto_is_a_memory_but_no_size() {
        assert_eq!("auto".parse(), Ok(Memory::Auto));
        assert!("auto".parse::<ByteSize>().is_err());
    }

    #[test]
    fn sizes_are_shown_in_their_largest_unit() {
        for (bytes, shown) in [(1, "1 B"), (64 * MIB, "64 MiB"), (3 * GIB / 2, "1.5 GiB"), (KIB, "1 KiB")] {
            assert_eq!(ByteSize(bytes).to_string(), shown);
        }
    }

    #[test]
    fn memory_is_rounded_down_to_whole_regions_with_a_remark() {
        let region = ByteSize(64 * MIB);
        assert_eq!(whole_regions(ByteSize(GIB), region).unwrap(), (ByteSize(GIB), None));
        let (rounded, remark) = whole_regions(ByteSize(100 * MIB), region).unwrap();
        assert_eq!(rounded, region);
        assert!(remark.unwrap().contains("rounded down"));
        assert!(whole_regions(ByteSize(MIB), region).is_err());
    }

    #[test]
    fn regions_are_powers_of_two_within_limits() {
        assert_eq!(parse_region_size("64MiB"), Ok(ByteSize(64 * MIB)));
        for text in ["3MiB", "512KiB", "2GiB"] {
            assert!(parse_region_size(text).unwrap_err().contains("powers of two"), "{text}");
        }
    }
}
