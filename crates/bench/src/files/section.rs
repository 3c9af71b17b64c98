//! The text of a figure, and the document that all figures make up.
//!
//! D1. A figure that is measured again replaces its old text; the other figures stay as they were.
//! D2. Promises are judged in the figure that measures them. The document begins with a summary of all
//!     promises in it.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use super::figure::{Document, Figure};
use super::verdict::{MISSED, Verdict};
use crate::folder::{make_folder, save};
use crate::machine::Machine;

const FILES_HEADER: &str = "\
# Files in far memory: the papers' figures, ours

<!-- Written by `make bench-files`; do not edit. `farpool bench paper files --figure NAME` renews one of the figures. -->

The names are those of the figures and tables in Mühleisen et al., *Peak Performance: Remote Memory
Revisited* (DaMoN 2013), and Li et al., *Accelerating Relational Databases by Leveraging Remote Memory and
RDMA* (SIGMOD 2016), which have networks of their own between machines. Here nodes, clients and peers share
one machine, which each figure names; so ratios within a figure are meaningful, and comparisons with the
papers' numbers are not.
";
const CACHE_HEADER: &str = "\
# The page cache: figures

<!-- Written by `make bench-cache`; do not edit. `farpool bench paper cache --figure NAME` renews one of the figures. -->

The page cache of Li et al., *Accelerating Relational Databases by Leveraging Remote Memory and RDMA*
(SIGMOD 2016), section 4.2, as [implemented here](../src/cache.md). Nodes, database and clients share one
machine, which each figure names; so ratios within a figure are meaningful, and comparisons with the paper's
numbers are not.
";

impl Document {
    /// Its name in its folder.
    fn name(self) -> &'static str {
        match self {
            Document::Files => "files.md",
            Document::Cache => "cache.md",
        }
    }

    fn header(self) -> &'static str {
        match self {
            Document::Files => FILES_HEADER,
            Document::Cache => CACHE_HEADER,
        }
    }

    /// Heads the table of a figure's promises, by which the table is found again (D2).
    fn promises_head(self) -> &'static str {
        match self {
            Document::Files => "| promised | reached | met |\n|---|---|---|\n",
            Document::Cache => "| promised | must | aim | reached | met |\n|---|---|---|---|---|\n",
        }
    }

    fn promise(self, verdict: &Verdict) -> String {
        match self {
            Document::Files => verdict.row(),
            Document::Cache => verdict.row_with_aim(),
        }
    }

    /// The summary of all promises, whose rows begin with the figure.
    fn summary(self, promises: &[String]) -> String {
        let explained = match self {
            Document::Files => String::new(),
            Document::Cache => cache_explained(promises),
        };
        let head = self.promises_head().replacen('|', "| figure |", 1).replacen("\n|", "\n|---|", 1);
        format!("{SUMMARY_HEAD}{explained}\n{head}{}", promises.concat())
    }
}

/// What the summary of the page cache's promises says first.
fn cache_explained(promises: &[String]) -> String {
    let missed = promises.iter().filter(|row| row.contains(MISSED)).count();
    let kept = match missed {
        0 => "Every promise was kept.".to_owned(),
        _ => format!("Promises that were {MISSED}: {missed} of {}.", promises.len()),
    };
    format!("\n{kept} *Must* is what was promised, and *aim* what was hoped for.\n")
}

const SUMMARY_HEAD: &str = "\
## What was promised, and what was measured

Each line is judged in its figure below, by the median of ratios that pair runs of one round; the range is in
parentheses.
";

/// A figure with everything that belongs to it.
pub struct Section {
    /// The figure.
    pub figure: Figure,
    /// Its paragraphs, each with a name: the question, the floor, the method.
    pub notes: Vec<(&'static str, String)>,
    /// Tables and remarks, in Markdown.
    pub body: String,
    /// Its promises.
    pub verdicts: Vec<Verdict>,
    /// An SVG.
    pub drawing: Option<String>,
}

impl Section {
    fn text(&self) -> String {
        let figure = self.figure;
        let notes: String = self.notes.iter().map(|(name, text)| format!("- **{name}**: {text}\n")).collect();
        let drawing = self.drawing.as_ref().map(|_| format!("\n![{figure}]({})\n", drawing_name(figure)));
        format!(
            "{}\n## {}\n\n{notes}\n{}{}",
            marker(figure),
            heading(figure),
            self.tables(),
            drawing.unwrap_or_default()
        )
    }

    /// Its tables and its promises, in Markdown.
    pub fn tables(&self) -> String {
        let document = self.figure.document();
        let rows: String = self.verdicts.iter().map(|verdict| document.promise(verdict)).collect();
        if rows.is_empty() {
            return self.body.clone();
        }
        format!("{}\n{}{rows}", self.body, document.promises_head())
    }
}

fn heading(figure: Figure) -> String {
    format!("{figure}: {}", figure.title())
}

/// The paragraph about everything that a figure depends on besides the program.
pub fn conditions(more: &str) -> (&'static str, String) {
    let commit = option_env!("FARPOOL_COMMIT").unwrap_or("unknown");
    ("Conditions", format!("{}; commit {commit}; {more}.", Machine::this()))
}

fn marker(figure: Figure) -> String {
    format!("<!-- figure {figure} -->\n")
}

fn drawing_name(figure: Figure) -> String {
    match figure.document() {
        Document::Files => format!("files-{figure}.svg"),
        Document::Cache => format!("cache-{figure}.svg"),
    }
}

/// Puts sections into the documents of a folder (D1).
pub fn write(dir: &Path, sections: &[Section]) -> Result<()> {
    make_folder(dir)?;
    [Document::Files, Document::Cache].into_iter().try_for_each(|document| {
        let is_there = sections.iter().any(|section| section.figure.document() == document);
        if is_there { write_document(dir, document, sections) } else { Ok(()) }
    })
}

fn write_document(dir: &Path, document: Document, sections: &[Section]) -> Result<()> {
    let path = dir.join(document.name());
    let old = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    for section in sections.iter().filter(|section| section.figure.document() == document) {
        if let Some(drawing) = &section.drawing {
            save(&dir.join(drawing_name(section.figure)), drawing)?;
        }
    }
    save(&path, &renewed(document, &old, sections))
}

fn renewed(document: Document, old: &str, sections: &[Section]) -> String {
    let part = |figure| {
        let fresh = sections.iter().find(|section| section.figure == figure).map(Section::text);
        fresh.or_else(|| part_of(old, figure))
    };
    let figures = Figure::ALL.into_iter().filter(|figure| figure.document() == document);
    let parts: Vec<(Figure, String)> = figures.filter_map(|figure| Some((figure, part(figure)?))).collect();
    let promises: Vec<String> = parts.iter().flat_map(|(figure, text)| promises_of(*figure, text)).collect();
    let mut text = document.header().to_owned();
    if !promises.is_empty() {
        text += &format!("\n{}", document.summary(&promises));
    }
    for (_, part) in parts {
        text += &format!("\n{}\n", part.trim());
    }
    text
}

/// The rows of a figure's promises, each with a link to the figure in front.
fn promises_of(figure: Figure, text: &str) -> Vec<String> {
    let tables = text.split(figure.document().promises_head()).skip(1);
    let rows = tables.flat_map(|rest| rest.lines().take_while(|row| !row.is_empty()));
    rows.map(|row| format!("| [{figure}](#{}) {row}\n", anchor(&heading(figure)))).collect()
}

/// The anchor that Markdown renderers derive from a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|it| it.is_alphanumeric() || matches!(it, ' ' | '-'));
    kept.map(|it| if it == ' ' { '-' } else { it.to_ascii_lowercase() }).collect()
}

/// A figure's text in the document: from its marker to the next one.
fn part_of(document: &str, figure: Figure) -> Option<String> {
    let start = document.find(&marker(figure))?;
    let rest = &document[start + marker(figure).len()..];
    let end = rest.find("<!-- figure ").unwrap_or(rest.len());
    Some(marker(figure) + &rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread::Spread;

    fn section(figure: Figure, body: &str) -> Section {
        let notes = vec![("Question", "how fast?".into())];
        Section { figure, notes, body: body.into(), verdicts: Vec::new(), drawing: Some("<svg/>".into()) }
    }

    fn spread(middle: f64) -> Spread {
        Spread { middle, least: middle / 2.0, most: 2.0 * middle }
    }

    #[test]
    fn the_document_begins_with_the_promises_of_all_figures_that_stand_in_it() {
        let kept = Verdict::at_most("ours", 1.5, "the floor", spread(1.5));
        let broken = Verdict::at_least("ours", 1.2, "the disk", spread(1.0));
        let share = Verdict::share("verifying", 0.25, spread(0.1));
        let with = |figure, verdicts| Section { verdicts, ..section(figure, "| a table |\n") };
        let old = renewed(
            Document::Files,
            "",
            &[with(Figure::Damon3, vec![kept, broken]), section(Figure::Sigmod5, "five\n")],
        );
        let both = renewed(Document::Files, &old, &[with(Figure::Checksum, vec![share])]);
        let summary = &both[..both.find("<!-- figure ").unwrap()];
        let link = "[damon3](#damon3-latency-of-small-transfers)";
        for row in [
            &format!("| {link} | ours ≤ 1.5 × the floor | 1.50 (0.75–3.00) | yes |\n"),
            &format!("| {link} | ours ≥ 1.2 × the disk | 1.00 (0.50–2.00) | **no** |\n"),
            "| [checksum](#checksum-what-verifying-costs) | verifying ≤ 25 % | 10.0 % (5.0 %–20.0 %) | yes |\n",
        ] {
            assert!(summary.contains(row), "{row} in {both}");
        }
        assert_eq!(summary.matches("| [").count(), 3);
        assert_eq!(renewed(Document::Files, &both, &[]), both);
        let without = renewed(
            Document::Files,
            &both,
            &[section(Figure::Damon3, "three\n"), section(Figure::Checksum, "c\n")],
        );
        assert!(!without.contains("promised"), "{without}");
    }

    #[test]
    fn the_promises_of_the_cache_have_aims_and_those_that_were_missed_are_counted() {
        let verdict = |limit, aim| Verdict::at_least("ours", limit, "the disk", spread(4.0)).aiming_at(aim);
        let verdicts = vec![verdict(3.0, Some(5.0)), verdict(8.0, Some(15.0)), verdict(4.0, None)];
        let with = Section { verdicts, ..section(Figure::CachedScan, "| a table |\n") };
        let document = renewed(Document::Cache, "", &[with]);
        assert!(document.contains("Promises that were **missed**: 1 of 3."), "{document}");
        let head = "| figure | promised | must | aim | reached | met |\n|---|---|---|---|---|---|\n| [cached-scan](#";
        assert!(document.contains(head), "{document}");
        let row = "| ours | ≥ 3 × the disk | ≥ 5 × | 4.00 (2.00–8.00) | yes, but not the aim |\n";
        assert_eq!(document.matches(row).count(), 2, "in the summary and in the figure: {document}");
        assert_eq!(renewed(Document::Cache, &document, &[]), document);
    }

    #[test]
    fn a_figure_measured_again_takes_its_old_place_and_the_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[section(Figure::Sigmod5, "five\n"), section(Figure::Damon2, "two\n")]).unwrap();
        write(dir.path(), &[section(Figure::Damon3, "three\n")]).unwrap();
        write(dir.path(), &[section(Figure::Damon2, "two again\n")]).unwrap();
        let document = fs::read_to_string(dir.path().join("files.md")).unwrap();
        let place = |text| document.find(text).unwrap_or_else(|| panic!("no {text} in {document}"));
        assert!(place("two again") < place("three") && place("three") < place("five"));
        assert_eq!(document.matches("## damon2:").count(), 1);
        assert!(document.starts_with(FILES_HEADER) && document.contains("![damon3](files-damon3.svg)"));
        assert!(dir.path().join("files-sigmod5.svg").exists());
        let again = renewed(Document::Files, &document, &[]);
        assert_eq!(again, document);
        assert!(!dir.path().join("cache.md").exists());
        write(dir.path(), &[section(Figure::CachedScan, "cached\n")]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("files.md")).unwrap(), document);
        let cache = fs::read_to_string(dir.path().join("cache.md")).unwrap();
        assert!(cache.starts_with(CACHE_HEADER) && cache.contains("(cache-cached-scan.svg)"), "{cache}");
    }
}
