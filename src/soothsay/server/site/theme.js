// Sets the colours before the first paint, so that the page does not flash. Not a module, since modules run too late.
try {
  const chosen = JSON.parse(localStorage.getItem("soothsay.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // the browser keeps nothing for this page
}
