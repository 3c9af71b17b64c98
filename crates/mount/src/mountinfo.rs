//! What `/proc/self/mountinfo` says of a path (proc_pid_mountinfo(5)). Pure: callers read the file.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The type of the file system mounted on exactly this path; of the topmost one, if there are several.
pub(crate) fn type_mounted_at<'a>(mountinfo: &'a [u8], path: &Path) -> Option<&'a str> {
    let lines = mountinfo.split(|&byte| byte == b'\n');
    let mut mounts = lines.filter_map(parse_line).filter(|(at, _)| OsStr::from_bytes(at) == path);
    mounts.next_back().map(|(_, kind)| kind)
}

/// Mount point and type of a line such as `36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw`.
fn parse_line(line: &[u8]) -> Option<(Vec<u8>, &str)> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mountpoint = unescape(fields.nth(4)?);
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some((mountpoint, std::str::from_utf8(kind).ok()?))
}

/// Decodes blanks, tabs, line ends and backslashes, which appear as `\` and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let code = match rest {
            [b'\\', digits @ ..] => digits.get(..3).and_then(|digits| std::str::from_utf8(digits).ok()),
            _ => None,
        };
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = &rest[4..];
            }
            None => {
                plain.push(*first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &[u8] = b"22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n\
        40 22 0:35 / /mnt/far rw,nosuid - fuse.farpool farpool rw,user_id=0\n\
        41 22 0:36 / /mnt/with\\040blank rw shared:7 master:2 - tmpfs none rw\n\
        42 40 0:37 / /mnt/far rw - tmpfs on-top rw\n\
        garbage\n";

    #[test]
    fn the_topmost_mount_of_exactly_that_path_is_found() {
        assert_eq!(type_mounted_at(SAMPLE, Path::new("/mnt/far")), Some("tmpfs"));
        assert_eq!(type_mounted_at(SAMPLE, Path::new("/mnt/with blank")), Some("tmpfs"));
        assert_eq!(type_mounted_at(SAMPLE, Path::new("/mnt")), None);
        let first_two = &SAMPLE[..SAMPLE.windows(3).position(|part| part == b"\n41").unwrap()];
        assert_eq!(type_mounted_at(first_two, Path::new("/mnt/far")), Some("fuse.farpool"));
    }

    #[test]
    fn broken_escapes_are_taken_as_they_are() {
        assert_eq!(unescape(b"a\\04"), b"a\\04");
        assert_eq!(unescape(b"\\777x"), b"\\777x");
        assert_eq!(unescape(b"\\134\\"), b"\\\\");
    }
}
