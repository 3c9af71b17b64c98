//! A figure written down, and the document that all of them make.
//!
//! D1. A figure that is measured again takes its old place; the others stay as they were.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use super::figure::Figure;
use crate::machine::Machine;

/// The document's name in its folder.
const DOCUMENT: &str = "files.md";
const HEADER: &str = "\
# Files in far memory: the papers' figures, ours

<!-- Written by `make bench-files`; do not edit. `farpool bench paper files --figure NAME` renews one of the figures. -->

The names are those of the figures and tables in Mühleisen et al., *Peak Performance: Remote Memory Revisited* (DaMoN
2013), and Li et al., *Accelerating Relational Databases by Leveraging Remote Memory and RDMA* (SIGMOD 2016), which have
networks of their own between machines. Here nodes, clients and peers share one machine, which each figure names; so
ratios within a figure mean something, and its figures beside the papers' do not.
";

/// A figure with everything that belongs to it.
pub struct Section {
    /// Which.
    pub figure: Figure,
    /// What its paragraphs are called, and what they say: the question, the floor, the method.
    pub notes: Vec<(&'static str, String)>,
    /// Tables and remarks, in Markdown.
    pub body: String,
    /// An SVG.
    pub drawing: Option<String>,
}

impl Section {
    fn text(&self) -> String {
        let figure = self.figure;
        let notes: String = self.notes.iter().map(|(name, text)| format!("- **{name}**: {text}\n")).collect();
        let drawing = self.drawing.as_ref().map(|_| format!("\n![{figure}]({})\n", drawing_name(figure)));
        format!(
            "{}\n## {figure}: {}\n\n{notes}\n{}{}",
            marker(figure),
            figure.title(),
            self.body,
            drawing.unwrap_or_default()
        )
    }
}

/// What every figure depends on besides itself, in words.
pub fn conditions(more: &str) -> (&'static str, String) {
    let commit = option_env!("FARPOOL_COMMIT").unwrap_or("unknown");
    ("Conditions", format!("{}; commit {commit}; {more}.", Machine::this()))
}

fn marker(figure: Figure) -> String {
    format!("<!-- figure {figure} -->\n")
}

fn drawing_name(figure: Figure) -> String {
    format!("files-{figure}.svg")
}

/// Puts sections into the document of a folder (D1).
pub fn write(dir: &Path, sections: &[Section]) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let path = dir.join(DOCUMENT);
    let old = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    for section in sections {
        if let Some(drawing) = &section.drawing {
            save(&dir.join(drawing_name(section.figure)), drawing)?;
        }
    }
    save(&path, &renewed(&old, sections))
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn renewed(old: &str, sections: &[Section]) -> String {
    let part = |figure| {
        let fresh = sections.iter().find(|section| section.figure == figure).map(Section::text);
        fresh.or_else(|| part_of(old, figure))
    };
    let parts = Figure::ALL.into_iter().filter_map(part).map(|text| format!("\n{}\n", text.trim()));
    HEADER.to_owned() + &parts.collect::<String>()
}

/// From a figure's marker to the next one.
fn part_of(document: &str, figure: Figure) -> Option<String> {
    let start = document.find(&marker(figure))?;
    let rest = &document[start + marker(figure).len()..];
    let end = rest.find("<!-- figure ").unwrap_or(rest.len());
    Some(marker(figure) + &rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(figure: Figure, body: &str) -> Section {
        let notes = vec![("Question", "how fast?".into())];
        Section { figure, notes, body: body.into(), drawing: Some("<svg/>".into()) }
    }

    #[test]
    fn a_figure_measured_again_takes_its_old_place_and_the_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[section(Figure::Sigmod5, "five\n"), section(Figure::Damon2, "two\n")]).unwrap();
        write(dir.path(), &[section(Figure::Damon3, "three\n")]).unwrap();
        write(dir.path(), &[section(Figure::Damon2, "two again\n")]).unwrap();
        let document = fs::read_to_string(dir.path().join(DOCUMENT)).unwrap();
        let place = |text| document.find(text).unwrap_or_else(|| panic!("no {text} in {document}"));
        assert!(place("two again") < place("three") && place("three") < place("five"));
        assert_eq!(document.matches("## damon2:").count(), 1);
        assert!(document.starts_with(HEADER) && document.contains("![damon3](files-damon3.svg)"));
        assert!(dir.path().join("files-sigmod5.svg").exists());
        let again = renewed(&document, &[]);
        assert_eq!(again, document);
    }
}
