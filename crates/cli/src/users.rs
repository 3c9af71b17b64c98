//! Users of this machine, as `/etc/passwd` lists them.

/// The number of a user, by name or number.
pub fn id_of(user: &str) -> Result<u32, String> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    let found = all()?.into_iter().find(|(name, _)| name == user);
    let id = found.map(|(_, id)| id);
    id.ok_or_else(|| format!("there is no user {user} in /etc/passwd; name another, or give the number"))
}

/// The name of a user; `None`: it has none.
pub fn name_of(id: u32) -> Result<Option<String>, String> {
    Ok(all()?.into_iter().find(|(_, number)| *number == id).map(|(name, _)| name))
}

/// Names and numbers.
fn all() -> Result<Vec<(String, u32)>, String> {
    let users = std::fs::read_to_string("/etc/passwd").map_err(|error| format!("/etc/passwd: {error}"))?;
    let user = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    Ok(users.lines().filter_map(user).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_found_by_name_and_number() {
        assert_eq!((id_of("root"), id_of("17"), name_of(0)), (Ok(0), Ok(17), Ok(Some("root".to_owned()))));
        assert_eq!(name_of(u32::MAX), Ok(None));
        assert!(id_of("no such user").unwrap_err().contains("give the number"));
    }
}
